import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelmark.frameworks.pytorch.extern import load_hooks
from accelmark.frameworks.pytorch.hooks import Hooks
from accelmark.frameworks.pytorch.training import evaluation
from accelmark.spec.errors import RequestError
from accelmark.spec.events import Started
from accelmark.spec.plugins.catalog import FolderRef, folder_module
from accelmark.train.loop.account import Account
from accelmark.train.loop.window import Window
from tests.train.conftest import RunHere
from tests.train.jobs import TINY, make_job

pytestmark = pytest.mark.adversary

GOOD = """
import torch
from accelmark.frameworks.pytorch.hooks import Hooks
from . import rates

class Extern(Hooks):
    def create_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=rates.LR)

    def backward(self, loss, scaler):
        # as the default does
        super().backward(loss, scaler)
"""


def vendor_folder(directory: Path, code: str) -> Path:
    folder = directory / "tiny-pytorch"
    (folder / "extern").mkdir(parents=True)
    (folder / "extern" / "__init__.py").write_text(code)
    (folder / "extern" / "rates.py").write_text("LR = 0.0\n")
    return folder


def test_a_vendors_hooks_replace_the_defaults_and_are_recorded(tmp_path: Path, run_here: RunHere) -> None:
    folder = vendor_folder(tmp_path, GOOD)
    ran = run_here(make_job(tmp_path, extern=folder))
    file = str(folder / "extern" / "__init__.py")
    assert ran.values("INIT_END")[0]["hooks"] == {"create_optimizer": f"{file}:7", "backward": f"{file}:10"}
    assert ran.values("LAUNCH_TRAINING")[0]["hooks"] == {
        "create_optimizer": {"file": file, "line": 7, "num_lines": 2},
        "backward": {"file": file, "line": 10, "num_lines": 3},
    }
    assert ran.values("STEP_END")[0]["learning_rate"] == 0.0


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("def loss(self): ...", "'loss'"),
        ("def train_steps(self): ...", "did you mean 'train_step'?"),
        ("settings = None", "'settings'"),
        ("def _update(self, training): ...", "'_update'"),
    ],
)
def test_only_hooks_may_be_replaced(tmp_path: Path, run_here: RunHere, body: str, name: str) -> None:
    code = f"from accelmark.frameworks.pytorch.hooks import Hooks\nclass Extern(Hooks):\n    {body}\n"
    folder = vendor_folder(tmp_path, code)
    ran = run_here(make_job(tmp_path, extern=folder))
    assert ran.exit_code == 2
    assert name in (ran.finished().message or "")
    assert "may replace convert_model" in (ran.finished().message or "")


def test_extern_has_to_be_a_class_of_hooks(tmp_path: Path) -> None:
    folder = vendor_folder(tmp_path, "class Extern:\n    pass\n")
    with pytest.raises(RequestError, match="has no class Extern"):
        load_hooks(FolderRef(name="tiny-pytorch", path=folder, sha256=""))


def test_a_vendor_folder_without_code_keeps_the_defaults(tmp_path: Path) -> None:
    assert load_hooks(FolderRef(name="tiny-pytorch", path=tmp_path, sha256="")) is Hooks
    assert load_hooks(None) is Hooks


def test_a_case_without_the_framework_lists_its_frameworks() -> None:
    with pytest.raises(RequestError, match=r"has no .*paddle\.py"):
        folder_module(FolderRef(name="tiny", path=TINY, sha256=""), "paddle")


def test_a_framework_without_a_backend_is_refused(tmp_path: Path, run_here: RunHere) -> None:
    job = make_job(tmp_path)
    job = job.model_copy(update={"key": job.key.model_copy(update={"framework": "pytorh"})})
    ran = run_here(job)
    assert ran.exit_code == 2
    assert "did you mean 'pytorch'?" in (ran.finished().message or "")


SAME = """
from accelmark.frameworks.pytorch.hooks import Hooks

class Extern(Hooks):
    def convert_model(self, model):
        return super().convert_model(model)
"""

IDENTITY = """
import torch
from accelmark.frameworks.pytorch.hooks import Hooks

class Extern(Hooks):
    def convert_model(self, model):
        for name, child in model.named_modules():
            for attribute, part in child.named_children():
                if isinstance(part, (torch.nn.ReLU, torch.nn.GELU, torch.nn.Tanh)):
                    setattr(child, attribute, torch.nn.Identity())
        return super().convert_model(model)
"""

OWN_FORWARD = """
from accelmark.frameworks.pytorch.hooks import Hooks

class Extern(Hooks):
    def convert_model(self, model):
        model.forward = type(model).forward.__get__(model)
        return super().convert_model(model)
"""

PATCH = """
import functools
import torch
from accelmark.frameworks.pytorch.hooks import Hooks

def faster(*arguments, **more):
    return torch.zeros(())

torch.nn.functional.silu = faster

step = torch.optim.SGD.step

@functools.wraps(step)
def twice(self, *arguments, **more):
    step(self, *arguments, **more)
    return step(self, *arguments, **more)

torch.optim.SGD.step = twice

class Extern(Hooks):
    pass
"""


def started_with(directory: Path, run_here: RunHere, code: str, **settings: object) -> Started:
    ran = run_here(make_job(directory, dict(settings), extern=vendor_folder(directory, code)))
    assert ran.exit_code == 0
    return Started.model_validate(ran.values("INIT_END")[0])


def test_passive_hooks_leave_the_model_unchanged(tmp_path: Path, run_here: RunHere) -> None:
    started = started_with(tmp_path, run_here, SAME)
    assert (started.num_replaced_modules, started.output_difference) == (0, 0.0)
    assert started.module_hash == started.standard_module_hash
    assert started.checkpoint_hash == started.trained_checkpoint_hash
    assert started.replaced_functions == ()


def test_a_removed_activation_is_found_without_parameter_changes(tmp_path: Path, run_here: RunHere) -> None:
    started = started_with(tmp_path, run_here, IDENTITY)
    assert started.parameter_hash == started.standard_parameter_hash
    assert started.module_hash != started.standard_module_hash
    assert started.num_replaced_modules > 0
    assert started.output_difference is not None
    assert started.output_difference > 0.02


def test_a_forward_replaced_on_a_module_is_found(tmp_path: Path, run_here: RunHere) -> None:
    started = started_with(tmp_path, run_here, OWN_FORWARD)
    assert "with a forward of its own" in " ".join(started.replaced_modules)


def test_a_replaced_framework_function_is_found(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "silu", torch.nn.functional.silu)  # put back after the test
    monkeypatch.setattr(torch.optim.SGD, "step", torch.optim.SGD.step)
    started = started_with(tmp_path, run_here, PATCH)
    silu, step = started.replaced_functions
    assert silu.startswith("torch.nn.functional.silu -> ")
    assert "extern/__init__.py:6" in silu
    assert step.startswith("torch.optim.SGD.step -> ")
    assert "extern/__init__.py" in step


@pytest.mark.parametrize("name", ["__init__", "__getattribute__", "__setattr__", "__init_subclass__"])
def test_an_extern_that_could_hide_what_it_replaces_is_refused(tmp_path: Path, run_here: RunHere, name: str) -> None:
    code = "from accelmark.frameworks.pytorch.hooks import Hooks\nclass Extern(Hooks):\n"
    code += f"    def {name}(self, *more): ...\n"
    ran = run_here(make_job(tmp_path, extern=vendor_folder(tmp_path, code)))
    assert ran.exit_code == 2
    assert f"Extern may not define {name}" in (ran.finished().message or "")


def test_an_extern_with_a_metaclass_is_refused(tmp_path: Path) -> None:
    code = (
        "from accelmark.frameworks.pytorch.hooks import Hooks\nclass Meta(type):\n    pass\n"
        "class Extern(Hooks, metaclass=Meta):\n    pass\n"
    )
    with pytest.raises(RequestError, match=r"a metaclass \(Meta\)"):
        load_hooks(FolderRef(name="tiny-pytorch", path=vendor_folder(tmp_path, code), sha256=""))


ON_THE_OBJECTS = """
import torch
from accelmark.frameworks.pytorch.hooks import Hooks

class Extern(Hooks):
    def convert_model(self, model):
        self.train_step = lambda training, batches: torch.tensor(0.5)
        self.case.eval_sums = lambda model, batch: {"correct": torch.tensor(1.0), "count": torch.tensor(1.0)}
        return super().convert_model(model)
"""

PATCHED_HOOKS = """
import torch
from accelmark.frameworks.pytorch import hooks

def create_optimizer(self, model):
    return torch.optim.RMSprop(model.parameters(), lr=0.003)

hooks.Hooks.create_optimizer = create_optimizer

class Extern(hooks.Hooks):
    pass
"""

OTHER_BODY = """
from accelmark.frameworks.pytorch import hooks
from accelmark.train.loop import window

def add(self, start, end, data_wait_ns, loss):
    return 0.0

window.Window.add.__code__ = add.__code__

class Extern(hooks.Hooks):
    pass
"""

AT_THE_END = """
from accelmark.train.loop import account
from accelmark.frameworks.pytorch import hooks

class Extern(hooks.Hooks):
    def backward(self, loss, scaler):
        super().backward(loss, scaler)
        account.Account.converged = lambda self: True
"""


def test_replaced_methods_of_instances_are_found(tmp_path: Path, run_here: RunHere) -> None:
    ran = run_here(make_job(tmp_path, extern=vendor_folder(tmp_path, ON_THE_OBJECTS)))
    (told,) = ran.values("INSPECTED")
    assert any(name.startswith("Extern.train_step of the object -> ") for name in told["replaced_functions"])
    assert any(name.startswith("Case.eval_sums of the object -> ") for name in told["replaced_functions"])


def test_a_monkeypatched_default_hook_is_found_and_its_work_compared(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hooks, "create_optimizer", Hooks.create_optimizer)  # put back after the test
    started = started_with(tmp_path, run_here, PATCHED_HOOKS)
    assert started.hooks == {}
    assert [name.partition(" -> ")[0] for name in started.replaced_functions] == [
        "accelmark.frameworks.pytorch.hooks.Hooks.create_optimizer"
    ]
    assert (started.optimizer_class, started.standard_optimizer_class) == ("RMSprop", "SGD")
    assert started.output_difference == 0.0
    assert started.trained_checkpoint_hash == started.checkpoint_hash


def test_a_replaced_function_body_is_found(tmp_path: Path, run_here: RunHere) -> None:
    kept = Window.add.__code__
    try:
        ran = run_here(make_job(tmp_path, extern=vendor_folder(tmp_path, OTHER_BODY)))
    finally:
        Window.add.__code__ = kept
    (replaced,) = ran.values("INIT_END")[0]["replaced_functions"]
    assert replaced.startswith("accelmark.train.loop.window.Window.add -> ")


def test_a_replacement_during_training_is_found_at_its_end(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Account, "converged", Account.converged)
    ran = run_here(make_job(tmp_path, extern=vendor_folder(tmp_path, AT_THE_END)))
    assert ran.values("INIT_END")[0]["replaced_functions"] == []
    (replaced,) = ran.values("INSPECTED")[0]["replaced_functions"]
    assert replaced.startswith("accelmark.train.loop.account.Account.converged -> ")


def test_replacements_by_the_frameworks_module_are_distinguished(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "madeup_module.py").write_text(
        "import torch\nfrom accelmark.frameworks.pytorch.training import evaluation\n"
        "torch.nn.functional.celu = lambda *a, **k: None\nevaluation.share_buffers = lambda *a: None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.nn.functional, "celu", torch.nn.functional.celu)
    monkeypatch.setattr(evaluation, "share_buffers", evaluation.share_buffers)
    job = make_job(tmp_path).model_copy(update={"framework_module": "madeup_module"})
    started = Started.model_validate(run_here(job).values("INIT_END")[0])
    assert started.num_module_functions == 1
    assert started.module_functions[0].startswith("torch.nn.functional.celu -> ")
    (replaced,) = started.replaced_functions
    assert replaced.startswith("accelmark.frameworks.pytorch.training.evaluation.share_buffers -> ")


def test_without_vendor_code_nothing_is_inspected_at_the_end(tmp_path: Path, run_here: RunHere) -> None:
    ran = run_here(make_job(tmp_path))
    assert ran.values("INSPECTED") == []
    assert ran.values("INIT_END")[0]["replaced_functions"] == []


def test_a_method_replaced_before_vendor_code_was_loaded_is_found(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hooks, "backward", lambda self, loss, scaler: loss.backward())
    (replaced,) = run_here(make_job(tmp_path)).values("INIT_END")[0]["replaced_functions"]
    assert replaced.startswith(
        "accelmark.frameworks.pytorch.hooks.Hooks.backward -> train/test_extern.py:"
    ) or replaced.startswith("accelmark.frameworks.pytorch.hooks.Hooks.backward -> tests/train/test_extern.py:")


def test_wrappers_that_pytorch_puts_around_its_own_functions_are_not_the_vendors(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nimport sys\nimport torch\n"
        "from accelmark.frameworks.pytorch.integrity.monkeypatch import Functions\nfunctions = Functions()\n"
        "model = torch.nn.Linear(2, 2)\ntorch.optim.SGD(model.parameters(), lr=0.1).step()\n"
        "import torch._dynamo\nprint(functions.replaced())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "()"
