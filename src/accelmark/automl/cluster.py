"""Ray clusters of a search (this machine, an address, SSH hosts), and its workers as Ray actors."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import pkgutil
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from accelmark.automl.config import AddressCluster, AutomlConfig, LocalCluster, SshCluster, report_interval_s
from accelmark.automl.model.graph import Network
from accelmark.automl.records import Message, TrainedWeights, TrialOrder, WorkerLost, WorkerReady
from accelmark.run.agent.host import source_address
from accelmark.run.host import Host, HostError, SubprocessHost
from accelmark.run.launchers.ssh.connection import SshConnection, deliver, wheel
from accelmark.run.launchers.ssh.options import Options
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import RequestError, RunError, raising

_ADDRESS_TIMEOUT_S: Final = 10.0
_NODE_START_S: Final = 120.0
_NODE: Final = "accelmark.automl.trial.ray_node"
_WORKER: Final = "accelmark.automl.trial.worker:TrialWorker"  # by name because it is job side
_PACKED_LOGS: Final = "accelmark.automl.trial.worker:packed_logs"
_TOKEN: Final = secrets.token_hex(32)
"""One for all clusters of this process, since Ray keeps the first that it reads; it is not written to a file."""
_WITH_TOKEN: Final = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
_LOGS_S: Final = 20.0
_LAST_DRAIN_S: Final = 30.0
_DISABLED: Final = ("RAY_DEDUP_LOGS", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")


@contextmanager
def cluster_address(cluster: LocalCluster | AddressCluster | SshCluster) -> Iterator[str | None]:
    """Provide a cluster; yield its address, or None where :func:`ray_workers` starts Ray on this machine."""
    with _environment_restored():
        match cluster:
            case LocalCluster(environment=variables):
                os.environ.update(variables)
                os.environ.update(_WITH_TOKEN)
                yield None
            case AddressCluster(address=address):
                host, _, port = address.rpartition(":")
                if host and port.isdigit():  # Ray itself would try for minutes
                    with raising(RunError, f"cannot connect to Ray at {address}: check that the cluster runs", OSError):
                        socket.create_connection((host.strip("[]"), int(port)), _ADDRESS_TIMEOUT_S).close()
                # Unlike ``ray start``, a client does not use this machine's token by default.
                file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
                if "RAY_AUTH_MODE" not in os.environ and (os.environ.get("RAY_AUTH_TOKEN") or file.is_file()):
                    os.environ["RAY_AUTH_MODE"] = "token"
                yield address
            case SshCluster():
                with ssh_cluster(cluster) as address:
                    yield address


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Restore this process's variables afterwards: Ray sets further ones, which no later run may inherit."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def ssh_cluster(cluster: SshCluster) -> Iterator[str]:
    """Start Ray's head here and a node on every host; yield the head's address; end all of them afterwards.

    Each host runs ``ray_node``, which ends Ray when its input closes, also where this process is killed.
    """
    first = cluster.hosts[0].rpartition("@")[2]
    with raising(RunError, f"{first}: there is no route to this host: give cluster.head_address", OSError):
        head_ip = cluster.head_address or source_address(first, cluster.port)
    address = f"{head_ip}:{cluster.port}"
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="ssh cluster", daemon=True)
    nodes = AsyncExitStack()
    thread.start()
    with _environment_restored(), TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True) as folder:
        os.environ.update(_WITH_TOKEN)
        common = {"token": _TOKEN, "ray": importlib.metadata.version("ray")}
        head = common | {"role": "head", "address": head_ip, "port": cluster.port, "folder": folder}
        try:
            for host in (None, *cluster.hosts):
                request = head if host is None else common | {"role": "node", "address": address}
                asyncio.run_coroutine_threadsafe(_start(nodes, cluster, host, request), loop).result()
            yield address
        finally:
            asyncio.run_coroutine_threadsafe(nodes.aclose(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def initialised(script: Path, command: Sequence[str]) -> list[str]:
    """Return the command that reads a shell script, whose output goes to the errors, and then becomes ``command``."""
    return ["bash", "-c", '. "$0" >&2 && exec "$@"', str(script), *command]


async def _start(nodes: AsyncExitStack, cluster: SshCluster, host: str | None, request: Mapping[str, object]) -> None:
    """Start ``ray_node`` on a host, or for None on this machine; ``nodes`` closes its input, which ends Ray."""
    place: Host = SubprocessHost(HostSpec(address="localhost"))
    python = [sys.executable]
    try:
        if host is not None:
            user, _, name = host.rpartition("@")
            options = Options(work_directory=cluster.work_directory, ssh_config=cluster.ssh_config)
            place = connection = SshConnection(HostSpec(address=name, user=user or None), options)
            nodes.push_async_callback(connection.close)
            code = PurePosixPath(cluster.work_directory) / "code" / wheel().directory
            await deliver(connection, cluster.python, code)
            variables = {**cluster.environment.get(host, {}), "PYTHONPATH": str(code)}
            python = ["env", *(f"{variable}={value}" for variable, value in variables.items()), cluster.python]
            if cluster.init_script is not None:
                python = initialised(cluster.init_script, python)
        line = json.dumps(request).encode() + b"\n"
        await nodes.enter_async_context(place.running([*python, "-m", _NODE], line, _NODE_START_S))
    except (HostError, TimeoutError) as error:
        problem = error.what if isinstance(error, HostError) else f"no answer within {_NODE_START_S:g} s"
        raise RunError(f"{host or 'this machine'}: Ray cannot be started: {problem}") from error


class WorkerPool:
    """Runs trials on Ray actors; raises RunError where one is not ready. ``ready`` has the last report of each."""

    def __init__(self, size: int, make: Callable[[], Any], kill: Callable[[Any], None]) -> None:
        self.size = size
        self._make: Final = make
        self._kill: Final = kill
        self._actors: dict[int, Any] = {}
        self.ready: dict[int, WorkerReady] = {}
        self._pending: dict[Future[Any], tuple[int, str]] = {}
        self._done: Final[SimpleQueue[Future[Any]]] = SimpleQueue()
        self._training: set[int] = set()
        self._drain_s: Final = report_interval_s(size)
        for worker in range(size):
            self.replace(worker)
        while len(self.ready) < size:
            for worker, message in self.listen(5.0):
                if isinstance(message, WorkerLost):
                    raise RunError(f"worker {worker} cannot start: {message.reason}")

    def close(self) -> None:
        """End all workers."""
        for actor in self._actors.values():
            self._kill(actor)

    def _submit(self, worker: int, method: str, *arguments: object) -> Future[Any]:
        future: Future[Any] = getattr(self._actors[worker], method).remote(*arguments).future()
        return future

    def _call(self, worker: int, method: Literal["ready", "drain", "run"], *arguments: object) -> None:
        future = self._submit(worker, method, *arguments)
        self._pending[future] = worker, method
        future.add_done_callback(self._done.put)

    def start(self, worker: int, order: TrialOrder, weights: TrainedWeights) -> None:
        """Give an idle worker a trial."""
        self._training.add(worker)
        self._call(worker, "run", order, weights)
        self._call(worker, "drain", self._drain_s)

    def cancel(self, worker: int) -> None:
        """Ask a worker to cut its trial."""
        self._submit(worker, "cancel")

    def replace(self, worker: int) -> None:
        """Kill a worker and start a new one."""
        self._pending = {future: call for future, call in self._pending.items() if call[0] != worker}
        self._training.discard(worker)
        if worker in self._actors:
            self._kill(self._actors[worker])
        self._actors[worker] = self._make()
        self._call(worker, "ready")

    def listen(self, timeout_s: float) -> list[tuple[int, Message]]:
        """Return messages with their workers; waits at most ``timeout_s`` for the first."""
        done: list[Future[Any]] = []
        with suppress(Empty):
            done.append(self._done.get(timeout=timeout_s if self._pending else min(timeout_s, 0.02)))
            while True:
                done.append(self._done.get_nowait())
        # Reports before results: the last epoch is reported before the trial's end.
        ordered = sorted(done, key=lambda future: self._pending.get(future, (0, ""))[1] == "run")
        return [message for future in ordered if future in self._pending for message in self._messages(future)]

    def _messages(self, future: Future[Any]) -> list[tuple[int, Message]]:
        worker, method = self._pending.pop(future)
        if method == "run":
            self._training.discard(worker)
        try:
            value = future.result()
        except Exception as error:  # noqa: BLE001 - any failure means that the worker is lost
            if method == "drain" and worker in self._training:
                return []  # the result's future fails too and is reported
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["the worker is gone"]
            # Of a traceback the last line, which has the error's type and message.
            reason = [lines[0], *(line for line in lines if "Error" in line.split(":")[0])][-1]
            is_memory = type(error).__name__ == "OutOfMemoryError"
            return [(worker, WorkerLost("out-of-memory" if is_memory else "lost", reason))]
        if method == "ready":
            self.ready[worker] = value
            return [(worker, value)]
        if method == "drain":
            if worker in self._training:
                self._call(worker, "drain", self._drain_s)
            return [(worker, message) for message in value]
        drains = [one for one, call in self._pending.items() if call == (worker, "drain")]
        for one in drains:
            del self._pending[one]
        reports: list[tuple[int, Message]] = []
        with suppress(Exception):  # the worker may be lost now, but the trial's result is known
            for one in (*drains, self._submit(worker, "drain", self._drain_s)):
                reports += [(worker, message) for message in one.result(_LAST_DRAIN_S)]
        return [*reports, (worker, value)]


def check_capacity(config: AutomlConfig, *, cores: int, accelerators: int) -> None:
    """Raise RequestError where the cluster cannot run all concurrent trials."""
    size, devices = config.schedule.concurrency, config.training.devices_per_trial
    capacity = (accelerators or cores) // devices
    if size > capacity:
        found = f"{accelerators} accelerators" if accelerators else f"{cores} processor cores"
        wanted = f"{size} concurrent trials of {devices} devices each were requested"
        raise RequestError(f"{wanted}; the cluster has {found}, enough for {capacity}")


@contextmanager
def ray_workers(config: AutomlConfig, network: Network, *, address: str | None) -> Iterator[WorkerPool]:
    """Provide workers as Ray actors with cores or accelerators of their own; ``address`` None starts Ray here."""
    with _environment_restored(), TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True) as folder:
        import ray  # reads the authentication mode of the environment when it is imported

        os.environ.update({name: "0" for name in _DISABLED if name not in os.environ})
        try:
            _connect(ray, address, folder)
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            cores, accelerators = (int(resources.get(name, 0)) for name in ("CPU", "GPU"))
            check_capacity(config, cores=cores, accelerators=accelerators)
            size, devices = config.schedule.concurrency, config.training.devices_per_trial
            threads = 0 if accelerators else max(1, cores // (size * devices))
            reserved = {"num_gpus": devices, "num_cpus": 1} if accelerators else {"num_cpus": devices}
            # Several threads let the actor answer while it trains.
            worker = ray.remote(pkgutil.resolve_name(_WORKER)).options(max_concurrency=4, max_restarts=0, **reserved)
            make = partial(worker.remote, config.dataset, network, devices, threads)
            with closing(WorkerPool(size, make, partial(ray.kill, no_restart=True))) as workers:
                yield workers
        finally:
            ray.shutdown()


def _connect(ray: Any, address: str | None, folder: str) -> None:
    """Start Ray here or connect to the cluster at an address; a SIGTERM in the meantime raises KeyboardInterrupt."""
    options: dict[str, Any] = {"address": address} if address else {"include_dashboard": False, "_temp_dir": folder}
    former = signal.getsignal(signal.SIGTERM)
    try:
        for is_last in (False, True):
            try:
                ray.init(log_to_driver=False, configure_logging=False, namespace="accelmark", **options)
                return
            except Exception as error:
                ray.shutdown()
                if address is not None:
                    raise RunError(
                        f"cannot connect to Ray at {address}: {error}. Check that it runs there, that it is Ray"
                        f" {ray.__version__} as here, and that its token, if it has one, is in RAY_AUTH_TOKEN or"
                        " ~/.ray/auth_token"
                    ) from error
                # Ray allows its own start half a minute, too little on a machine with a busy disk or busy cores.
                if is_last or "timed out during startup" not in str(error):
                    raise RunError(f"Ray cannot be started: {error}") from error
    except SystemExit as error:  # from Ray's own handler of SIGTERM
        raise KeyboardInterrupt from error
    finally:
        if threading.current_thread() is threading.main_thread():  # no other may handle signals
            signal.signal(signal.SIGTERM, former)


def write_node_logs(folder: Path) -> None:
    """Write the logs of Ray's processes on each node that answers to ``<address>.tar.gz``."""
    import ray

    if not ray.is_initialized():
        return
    pack = ray.remote(pkgutil.resolve_name(_PACKED_LOGS))
    with suppress(ray.exceptions.RayError):
        nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
        addresses = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        own = {address: {f"node:{address}": 0.001} for address in addresses}
        sent = {pack.options(num_cpus=0, max_retries=0, resources=own[at]).remote(): at for at in addresses}
        folder.mkdir(parents=True, exist_ok=True)
        for reference in ray.wait(list(sent), num_returns=len(sent), timeout=_LOGS_S)[0]:
            (folder / f"{sent[reference]}.tar.gz").write_bytes(ray.get(reference))
