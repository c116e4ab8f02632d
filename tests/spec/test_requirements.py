"""Requirements are checked by the metadata of installed packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.requirements import (
    Need,
    distributions,
    install_command,
    missing,
    missing_text,
    require,
    requirement_names,
)

PIP = f"{sys.executable} -m pip install"
CASE = Need(requirement="transformers>=5.0", needed_by="case bert")
ENGINE = Need(requirement="onnxruntime>=1.20 | onnxruntime-gpu>=1.20", needed_by="engine onnxruntime")
VERSIONS: dict[str, str] = {"transformers": "4.1", "onnxruntime-gpu": "1.22"}
NONE: dict[str, str] = {}


def test_a_missing_package_names_its_user_and_the_installed_version() -> None:
    (found,) = missing([CASE, ENGINE], VERSIONS.get)
    assert missing_text([found]) == "case bert needs transformers>=5.0, but 4.1 is installed"
    assert install_command([found]) == f"{PIP} 'transformers>=5.0'"
    assert install_command([found], "/opt/python") == "/opt/python -m pip install 'transformers>=5.0'"


def test_one_alternative_suffices_and_the_first_is_recommended() -> None:
    assert missing([ENGINE], VERSIONS.get) == []
    (found,) = missing([ENGINE], NONE.get)
    assert missing_text([found]) == "engine onnxruntime needs onnxruntime>=1.20, which is not installed"
    assert distributions([CASE, ENGINE]) == ["onnxruntime", "onnxruntime-gpu", "transformers"]


def test_packages_installed_for_the_ranks_are_not_missing(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("--prefer-binary\ntransformers==5.1  # for this case\n\n")
    assert missing([CASE], NONE.get, given=list(requirement_names(tmp_path / "requirements.txt"))) == []


def test_an_extra_of_accelmark_stands_for_its_packages() -> None:
    need = Need(requirement="accelmark[torch]", needed_by="framework pytorch")
    assert "torch" in distributions([need])
    found = missing([need], NONE.get)
    assert install_command(found) == f"{PIP} 'accelmark[torch]'"
    index = "https://index.example.com/cpu"
    assert install_command(found, index=index) == f"{PIP} --extra-index-url {index} 'accelmark[torch]'"
    assert missing([need]) == []


def test_a_verb_names_the_command_that_installs_what_it_needs() -> None:
    require("accelmark view", "pydantic>=2")
    with pytest.raises(RequestError) as caught:
        require("accelmark view", "pydantic>=2", "no-such-package>=3")
    assert str(caught.value) == (
        f"accelmark view needs no-such-package>=3, which is not installed: run {PIP} 'no-such-package>=3'"
    )
