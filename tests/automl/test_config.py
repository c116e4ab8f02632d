"""Valid and invalid configurations of both forms."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from accelmark.automl.cluster import initialised
from accelmark.automl.config import AutomlConfig, ScheduleConfig, SshCluster, TuningConfig
from accelmark.automl.controller import check_request
from accelmark.automl.model.graph import Convolution, GlobalPool, Softmax
from accelmark.automl.model.seeds import resolve_network
from accelmark.compat.aiperf import load_search
from accelmark.spec.errors import RequestError, SpecError
from tests.automl.images import chain

AIPERF = """\
authorName: default
experimentName: example_imagenet-network-morphism-test
trialConcurrency: 2\t\t# 1
maxExecDuration: 12h\t# 2
maxTrialNum: 30000
trainingServicePlatform: local
useAnnotation: false
tuner:
 \\#choice: TPE, Random, Anneal, Evolution, BatchTuner, NetworkMorphism
 \\#SMAC (SMAC should be installed through nnictl)
 builtinTunerName: NetworkMorphism
 classArgs:
  optimize_mode: maximize
  task: cv
  input_width: 224
  input_channel: 3
  n_output_node: 1000

trial:
 command: CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7  \\                                  # 3
       python3 imagenet_train.py \\
       --slave 2 \\\t\t\t\t\t\t\t\t  # 5
       --ip ${AIPERF_MASTER_IP} \\\t\t\t\t\t\t\t  # 6
       --batch_size 448 \\\t\t\t\t\t\t  # 7
       --epoch 60 \\\t\t\t\t\t\t          # 8
       --initial_lr 1e-1 \\\t\t\t\t\t\t  # 9
       --final_lr 0 \\\t\t\t\t\t\t  # 10
       --train_data_dir /data/imagenet/train/ \\  # 11
       --val_data_dir /data/imagenet/val/ # 12

 codeDir: .
 gpuNum: 0
"""
"""AIPerf's own example from its README, remarks and all."""

OURS = """\
name: try
network: small28
dataset: {name: fashion-mnist, directory: data}
schedule: {concurrency: 2, max_duration: 10m, round_epochs: [1, 2]}
training: {batch_size: 128, learning_rate: 5e-2}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(tmp_path: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_search(written(tmp_path, text))
    return str(caught.value)


def test_aiperfs_own_example_is_read_unchanged(tmp_path: Path) -> None:
    config, unused = load_search(written(tmp_path, AIPERF))
    assert config.schedule.concurrency == 2
    assert config.schedule.max_duration == 12 * 3600
    assert config.schedule.max_trials == 30000
    assert config.schedule.round_epochs == (15, 30, 45, 60)
    assert config.schedule.tuning_round == 4
    assert config.training.batch_size == 448
    assert config.training.learning_rate == 0.1
    assert config.training.devices_per_trial == 8
    assert config.tuning.kernel == (3, 5, 7)
    assert config.tuning.batch_size == (384, 416, 448)  # 12, 13 and 14 times the 32 GiB that 448 is made for
    assert str(config.dataset.train_directory) == "/data/imagenet/train"
    assert config.counting == "aiperf-v1"
    assert resolve_network(config.network).name == "resnet50"
    assert any(line.startswith("authorName") for line in unused)
    assert any("--ip" in line for line in unused)


def test_unknown_keys_and_flags_of_an_aiperf_file_are_listed(tmp_path: Path) -> None:
    text = AIPERF.replace("maxTrialNum", "maxTrialNumber").replace("--final_lr 0", "--final_rl 0")
    unused = "\n".join(load_search(written(tmp_path, text))[1])
    assert "maxTrialNumber: unknown key (did you mean 'maxTrialNum'?)" in unused
    assert "--final_rl 0' has no effect here; known flags: --slave" in unused


SERVERS = """[
    {"ip": "172.23.33.33", "tag": "", "status": "waiting", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
    {"ip": "172.23.33.34", "tag": "", "status": "waiting", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
]
"""
"""AIPerf's own example of servers."""


def test_aiperfs_servers_are_the_hosts_of_the_search_with_their_devices(tmp_path: Path) -> None:
    servers = tmp_path / "servers.json"
    servers.write_text(SERVERS)
    (tmp_path / "server_env_init.sh").write_text("spack load python\n")
    config, unused = load_search(written(tmp_path, AIPERF), servers)
    assert config.cluster.model_dump(include={"kind", "hosts", "environment", "init_script"}) == {
        "kind": "ssh",
        "hosts": ("172.23.33.33", "172.23.33.34"),
        "environment": {f"172.23.33.{n}": {"CUDA_VISIBLE_DEVICES": "0,1,2,3"} for n in (33, 34)},
        "init_script": tmp_path / "server_env_init.sh",
    }
    assert config.training.devices_per_trial == 4
    listed = "\n".join(unused)
    for word in ("status: has no effect", "tag: has no effect", "6,7: the servers' own", "imagenet_train.py"):
        assert word in listed
    servers.write_text(SERVERS.replace('"0,1,2,3"}\n]', '"0,1"}\n]'))
    with pytest.raises(SpecError, match="different numbers of cards"):
        load_search(written(tmp_path, AIPERF), servers)
    servers.write_text(SERVERS)
    text = AIPERF.replace("trialConcurrency: 2", "trialConcurrency: 3").replace("--slave 2", "--slave 3")
    with pytest.raises(SpecError, match="trialConcurrency: must be the number of servers, 2"):
        load_search(written(tmp_path, text), servers)


def test_a_hosts_script_sets_the_variables_of_its_ray(tmp_path: Path) -> None:
    script = tmp_path / "it's an init.sh"
    script.write_text("echo loaded\nexport ACME_HOME=/opt/acme\n")
    command = initialised(script, ["env", "EXTRA=$x y", "printenv", "ACME_HOME", "EXTRA"])
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("/opt/acme\n$x y\n", "loaded\n")


def test_a_cluster_file_names_the_hosts_of_either_kind_of_search(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    hosts = "hosts: [{address: n1, user: me}, {address: n2, port: 2222}]"
    cluster.write_text(f"launcher: ssh\nvendor: nvidia\npython: /opt/python\n{hosts}\n")
    for text in (AIPERF, OURS):
        config, unused = load_search(written(tmp_path, text), cluster)
        expected = {"hosts": ("me@n1", "n2"), "python": "/opt/python"}
        assert config.cluster.model_dump(include={"hosts", "python"}) == expected
        assert [line.split(": ")[1] for line in unused if line.startswith("cluster.yaml")] == ["vendor", "port"]
    assert load_search(written(tmp_path, AIPERF), cluster)[0].training.devices_per_trial == 8


def test_devices_are_the_indices_of_an_aiperf_file_or_all_and_other_words_are_listed(tmp_path: Path) -> None:
    config, _ = load_search(written(tmp_path, AIPERF))
    assert config.cluster.model_dump()["environment"] == {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    text = AIPERF.replace("CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 ", "OMP_NUM_THREADS=4 srun --cpus-per-task=30 ")
    config, unused = load_search(written(tmp_path, text.replace("  \\   ", " \\   ")), num_devices=4)
    assert config.training.devices_per_trial == 4
    assert any("srun --cpus-per-task=30" in line and "imagenet_train.py" in line for line in unused), unused
    assert any("OMP_NUM_THREADS" in line for line in unused)


@pytest.mark.parametrize(
    ("width", "channels", "classes", "network"),
    [(64, 3, 200, "resnet50-64-200"), (32, 3, 100, "small-32-100"), (48, 1, 7, "small-48-7")],
)
def test_images_of_any_size_have_a_seed_network(
    tmp_path: Path, width: int, channels: int, classes: int, network: str
) -> None:
    text = AIPERF.replace("width: 224", f"width: {width}").replace("node: 1000", f"node: {classes}")
    config, unused = load_search(written(tmp_path, text.replace("channel: 3", f"channel: {channels}")))
    assert any("tuner.classArgs.input_channel" in line for line in unused) == (channels != 3)
    assert (config.network, config.dataset.name) == (network, "imagenet")
    seed = resolve_network(network)
    assert (seed.input_shape, seed.classes) == ((3, width, width), classes)


def test_the_command_is_data_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = AIPERF.replace("python3 imagenet_train.py", f"$(touch {mark}); `touch {mark}` imagenet_train.py")
    load_search(written(tmp_path, text))
    assert not mark.exists()


def test_all_problems_of_an_aiperf_file_are_reported_at_once(tmp_path: Path) -> None:
    text = AIPERF.replace("NetworkMorphism\n classArgs", "NetworkMorphisms\n classArgs").replace("12h", "soon")
    text = text.replace("--slave 2", "--slave 3").replace("--batch_size 448", "--batch_size many")
    message = problems(tmp_path, text)
    for part in ("did you mean 'NetworkMorphism'", "--slave", "'many'", "not a duration"):
        assert part in message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Concurrency: 2", "Concurrency: 2.7", "trialConcurrency: must be a whole number of at least 1, found 2.7"),
        ("maxTrialNum: 30000", "maxTrialNum: true", "maxTrialNum: must be a whole number of at least 1, found True"),
        ("Duration: 12h", "Duration: .inf", "maxExecDuration: must be a time above 0, such as 12h, found inf"),
        ("--initial_lr 1e-1", "--initial_lr inf", "trial.command --initial_lr: must be a number above 0, found 'inf'"),
        ("--final_lr 0", "--final_lr -1", "trial.command --final_lr: must be a number of at least 0, found '-1'"),
        ("--batch_size 448", "--batch_size 450", "trial.command --batch_size: must be a multiple of the 8 cards"),
    ],
)
def test_an_invalid_number_in_an_aiperf_file_is_never_rounded(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in AIPERF
    (line,) = problems(tmp_path, AIPERF.replace(old, new)).splitlines()
    assert re.search(message, line)


@pytest.mark.parametrize(("given", "named"), [("测试", "aiperf"), ("-x/../y", "x-..-y"), ("n" * 200, "n" * 80)])
def test_any_experiment_name_becomes_a_valid_directory_name(tmp_path: Path, given: str, named: str) -> None:
    config, unused = load_search(written(tmp_path, AIPERF.replace("example_imagenet-network-morphism-test", given)))
    assert config.name == named
    assert any(line.startswith(f"experimentName: the run is called {named!r}") for line in unused)


def test_paths_in_our_own_form_are_relative_to_the_file(tmp_path: Path) -> None:
    config, _ = load_search(written(tmp_path, OURS))
    assert config.dataset.directory == (tmp_path / "data").resolve()
    assert config.schedule.max_duration == 600
    assert config.training.learning_rate == 0.05
    assert resolve_network(config.network).name == "small28"


def test_all_problems_of_our_own_form_are_reported_at_once(tmp_path: Path) -> None:
    text = OURS.replace("network:", "netwrok:").replace("concurrency: 2", "concurrency: 0")
    text = text.replace("batch_size: 128", "batch_size: x")
    message = problems(tmp_path, text + "rules: aiperf\ntuning: {kernel: [2]}\nsearch: {method: genetic}\n")
    for part in ("mean 'network'", "schedule.concurrency", "training.batch_size", "aiperf-v1", "odd", "genetic"):
        assert part in message


@pytest.mark.parametrize(
    ("limits", "more", "message"),
    [
        ("max_trials: 9, final_share: 0.5", "", "give one, and no max_trials"),
        ("max_trials: 9, max_duration: 10m, final_share: 0.5", "", "give one, and no max_trials"),
        ("tuning_round: 4", "", "give max_trials, max_duration or max_operations"),
        ("max_duration: 10m", "tuning: {seed_trials: 3}\n", "write schedule.tuning_round: 1"),
        ("max_duration: 10m", "search: {method: halving}\n", "write 1 or null"),
        ("max_duration: 10m", "search: {max_kernel: 5}\n", "tuning.kernel: 7 is above search.max_kernel, 5"),
        ("max_duration: 10m, tuning_round: null", "search: {max_kernel: 5}\n", None),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, limits: str, more: str, message: str | None
) -> None:
    text = OURS.replace("max_duration: 10m", limits) + more
    assert message in problems(tmp_path, text) if message else load_search(written(tmp_path, text))


def test_a_host_that_is_listed_twice_is_named(tmp_path: Path) -> None:
    servers = tmp_path / "servers.json"
    servers.write_text('[{"ip": "10.0.0.1"}, {"ip": "10.0.0.1"}]')
    with pytest.raises(SpecError, match=r"servers.json.*10\.0\.0\.1"):
        load_search(written(tmp_path, AIPERF), servers)
    with pytest.raises(ValidationError, match="node1"):
        SshCluster(kind="ssh", hosts=("node1", "node2", "node1"))


RULES = "name: short\nversion: 3\nmin_accuracy: 0.5\npinned: {search.method: bayesian}\n"


def with_rules(tmp_path: Path, text: str) -> str:
    (tmp_path / "own-rules.yaml").write_text(text)
    return OURS + "rules: own-rules.yaml\n"


def test_a_users_rule_set_is_a_file_next_to_the_search_file(tmp_path: Path) -> None:
    config, _ = load_search(written(tmp_path, with_rules(tmp_path, RULES)))
    assert (config.rules.name, config.rules.version, config.rules.min_accuracy) == ("short", 3, 0.5)
    assert load_search(written(tmp_path, config.model_dump_json()))[0].rules == config.rules, "kept with the search"
    other, _ = load_search(written(tmp_path, with_rules(tmp_path, RULES.replace("0.5", "0.6"))))
    assert other.rules.sha256 != config.rules.sha256
    assert len(config.rules.sha256) == 64


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("min_accuracy", "min_accurcy", r"own-rules\.yaml': min_accurcy: unknown key \(did you mean 'min_accuracy'"),
        ("search.method", "search.metod", r"rules short: pinned\.search\.metod: unknown .*mean 'search\.method'"),
        ("name: short\nversion: 3", "name: aiperf-v1\nversion: 4", None),
        ("name: short\nversion: 3", "name: aiperf-v1\nversion: 3", "is a rule set of AccelMark's, with other values"),
    ],
)
def test_a_mistake_in_a_rule_set_is_one_error(tmp_path: Path, old: str, new: str, message: str | None) -> None:
    text = with_rules(tmp_path, RULES.replace(old, new))
    if message is None:
        load_search(written(tmp_path, text))  # another version than the shipped one
    else:
        found = problems(tmp_path, text)
        assert re.search(message, found)
        assert "\n" not in found


def test_a_stall_that_is_shorter_than_the_reports_of_many_workers_is_refused(tmp_path: Path) -> None:
    text = OURS.replace("concurrency: 2", "concurrency: 4096").replace("5e-2}", "5e-2, stall: 40s}")
    message = "training.stall: each of 4096 workers reports every 30 s: 40 s is too short, take at least 60 s"
    assert message in problems(tmp_path, text)
    load_search(written(tmp_path, text.replace("40s", "60s")))


@pytest.mark.parametrize("tuner", ["Anneal", "SMAC", "TPE"])
def test_tuners_of_aiperf_are_methods(tmp_path: Path, tuner: str) -> None:
    config, _ = load_search(written(tmp_path, AIPERF.replace("Name: NetworkMorphism", f"Name: {tuner}")))
    assert config.search.method == tuner.lower()


def test_a_method_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = load_search(written(tmp_path, OURS + "search: {method: smac}\n"))

    def version(name: str, found: Callable[[str], str] = importlib.metadata.version) -> str:
        if name == "smac":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(RequestError, match=r"search\.method: smac.*pip install 'accelmark\[smac\]'"):
        check_request(config, resolve_network(config.network))


@pytest.mark.parametrize(
    ("searched", "message"),
    [
        ({"kernel": (5,)}, r"tuning\.kernel: network 'plain' has no spatial convolution .* write tuning\.kernel: \[\]"),
        ({"kernel": (), "dropout": (0.1, 0.5)}, r"tuning\.dropout: network 'plain' has neither .*: null"),
    ],
)
def test_a_searched_hyperparameter_that_changes_nothing_of_the_network_is_refused(
    searched: dict[str, object], message: str
) -> None:
    network = chain("plain", Convolution(filters=4, kernel=3, padding=1), GlobalPool(), Softmax())
    cluster = SshCluster(kind="ssh", hosts=("n1",))
    config = AutomlConfig(
        schedule=ScheduleConfig(max_trials=1), tuning=TuningConfig.model_validate(searched), cluster=cluster
    )
    with pytest.raises(RequestError, match=message):
        check_request(config, network)
    untuned = ScheduleConfig(max_trials=1, tuning_round=None)
    assert check_request(config.model_copy(update={"schedule": untuned}), network) is None
    assert check_request(config, resolve_network("small28")) is None
