"""The manifests of deploy/kubernetes: their schemas, what must agree among them, and a run of their commands."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shoal
from cluster_fakes import TIMEOUT, HeldPort
from manifests import KUBERNETES, ROOT, Pods, check, documents, give_keys, pods
from serving import ask, exported, trained
from shoal.cli import main, parser
from shoal.cluster.launch.child import ChildProcess, end_all
from shoal.cluster.protocol.curve import Keys, make_keys
from shoal.cluster.protocol.reports import pid_of
from shoal.cluster.protocol.scheduler_client import SchedulerClient
from shoal.cluster.protocol.status import GetStatus, StatusReply
from tiers import long_but

WHOLE = ["job", "jobset", "volcano"]
ALL = sorted(path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml"))


@pytest.mark.parametrize("directory", ALL)
def test_every_object_has_its_schema(directory):
    found = documents(directory)
    assert found
    for document in found:
        check(document)


@pytest.mark.slow
def test_the_schemas_refuse_a_field_that_they_do_not_know():
    errors = tuple(pytest.importorskip(name).ValidationError for name in ("jsonschema", "kubernetes_validate"))
    for directory, kind in [
        ("job", "StatefulSet"),
        ("job", "Job"),
        ("jobset", "JobSet"),
        ("volcano", "Job"),
        ("kserve", "ServingRuntime"),
        ("kserve", "InferenceService"),
    ]:
        (document, *_) = (one for one in documents(directory) if one["kind"] == kind)
        document["spec"]["replica"] = 1
        with pytest.raises(errors):
            check(document)
    for directory in ("jobset", "volcano"):
        (document,) = (one for one in documents(directory) if one["kind"] in ("JobSet", "Job"))
        jobs = document["spec"].get("replicatedJobs") or document["spec"]["tasks"]
        template = jobs[0]["template"]
        pod = template["spec"].get("template", template)
        pod["spec"]["containers"][0]["imagee"] = "x"
        with pytest.raises(errors):
            check(document)


@pytest.mark.parametrize("directory", ALL)
def test_kustomize_makes_the_objects_that_these_tests_read(directory):
    yaml = pytest.importorskip("yaml")
    if shutil.which("kustomize") is None:
        pytest.skip("kustomize is not installed")
    done = subprocess.run(
        ["kustomize", "build", KUBERNETES / directory], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    found = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    for document in found:
        check(document)

    def names(objects):
        return sorted((one["kind"], one["metadata"]["name"]) for one in objects)

    assert names(found) == names(documents(directory))
    assert set(re.findall(r"image: (\S+)", done.stdout)) <= {"shoal:latest", "shoal-ray:latest"}


@pytest.mark.parametrize("directory", WHOLE)
def test_the_numbers_of_the_roles_agree(directory):
    found = pods(directory)
    scheduler, server, worker = (found[role] for role in ("scheduler", "server", "worker"))
    servers = scheduler.option("servers") or scheduler.environment["VC_SERVER_NUM"]
    assert int(servers) == server.count
    assert int(scheduler.option("replicas")) < server.count
    given = worker.variables(0, "n")
    assert int(given.get("SHOAL_WORKERS") or given["VC_WORKER_NUM"]) == worker.count
    ports = {one["containerPort"] for one in server.container["ports"]}
    first = int(server.option("bind").rpartition(":")[2])
    assert {first + k for k in range(int(server.option("threads")))} < ports
    for one in (scheduler, server):
        metrics = int(one.option("metrics-port").rpartition(":")[2])
        assert metrics in {port["containerPort"] for port in one.container["ports"]}
        assert one.container["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert one.container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    metrics = int(worker.variables(0, "n")["SHOAL_METRICS_PORT"].rpartition(":")[2])
    (port,) = worker.container["ports"]
    assert port["containerPort"] == metrics
    assert worker.container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}
    assert float(server.option("drain-on-sigterm")) < server.spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("directory", WHOLE)
def test_no_container_has_more_rights_or_keys_than_it_needs(directory, tmp_path):
    make_keys(tmp_path / "keys")
    for role, pod in pods(directory).items():
        assert pod.spec["securityContext"]["runAsNonRoot"]
        assert pod.container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod.container["securityContext"]["readOnlyRootFilesystem"]
        assert [name for name in pod.secrets() if name.endswith("secret")] == [f"{role}.key_secret"]
        keys = Keys.load(give_keys(tmp_path / "keys", pod, tmp_path / role), role)
        for other in ("scheduler", "server"):
            assert keys.public_of(other)


@pytest.mark.parametrize("directory", WHOLE)
def test_the_arguments_are_those_of_the_commands(directory):
    for role in ("scheduler", "server"):
        words = pods(directory)[role].container["args"]
        assert vars(parser().parse_args(words))["metrics_port"] == "0.0.0.0:9100"


def test_the_names_of_pods_are_published_before_the_pods_are_ready():
    found = documents("base")
    (service,) = (one for one in found if one["kind"] == "Service")
    assert service["spec"]["publishNotReadyAddresses"]
    (budget,) = (one for one in found if one["kind"] == "PodDisruptionBudget")
    sets = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "StatefulSet"}
    for one in sets.values():
        assert one["serviceName"] == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= one["template"]["metadata"]["labels"].items()
        assert one["selector"]["matchLabels"].items() <= one["template"]["metadata"]["labels"].items()
    labels = sets["shoal-server"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    replicas = int(pods("base")["scheduler"].option("replicas"))
    assert budget["spec"]["maxUnavailable"] <= replicas
    assert pods("base")["server"].option("scheduler") == f"tcp://shoal-scheduler-0.{service['metadata']['name']}:5570"


def test_a_failed_job_of_a_job_set_does_not_restart_the_servers():
    (jobs,) = (one["spec"] for one in documents("jobset") if one["kind"] == "JobSet")
    assert jobs["failurePolicy"]["maxRestarts"] == 0
    assert [rule["action"] for rule in jobs["failurePolicy"]["rules"]] == ["FailJobSet"]
    for one in jobs["replicatedJobs"]:
        job = one["template"]["spec"]
        assert job["backoffLimit"] >= 1000
        assert "podFailurePolicy" not in job  # with one, terminating pods are not replaced
        assert job["podReplacementPolicy"] == "TerminatingOrFailed"
        assert job["template"]["spec"]["restartPolicy"] == "OnFailure"


def test_no_pod_of_a_job_set_that_would_end_with_success_is_evicted():
    found = documents("jobset")
    (job_set,) = (one for one in found if one["kind"] == "JobSet")
    (budget,) = (one["spec"] for one in found if one["kind"] == "PodDisruptionBudget")
    assert budget["selector"]["matchLabels"] == {"jobset.sigs.k8s.io/jobset-name": job_set["metadata"]["name"]}
    (chosen,) = budget["selector"]["matchExpressions"]
    jobs = [one["template"]["spec"] for one in job_set["spec"]["replicatedJobs"]]
    chosen_jobs = [one for one in jobs if one["template"]["metadata"]["labels"][chosen["key"]] in chosen["values"]]
    assert budget["minAvailable"] == sum(job["completions"] for job in chosen_jobs)
    assert len(chosen_jobs) == len(jobs) - 1  # all but the workers


def test_the_image_runs_as_the_user_of_the_pods_and_copies_what_it_needs():
    lines = (ROOT / "Dockerfile").read_text()
    user = re.search(r"^USER (\d+):(\d+)$", lines, re.MULTILINE)
    for directory in WHOLE:
        for pod in pods(directory).values():
            context = pod.spec["securityContext"]
            assert (context["runAsUser"], context["runAsGroup"]) == (int(user[1]), int(user[2]))
    assert 'ENTRYPOINT ["shoal"]' in lines
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = {name for line in re.findall(r"^COPY (?!--)(.*)$", lines, re.MULTILINE) for name in line.split()[:-1]}
    assert copied == set(kept)
    assert all((ROOT / name).exists() for name in kept)


@pytest.mark.slow
def test_the_runtime_of_kserve_serves_an_export_at_the_paths_of_its_probes(tmp_path):
    (runtime,) = (one for one in documents("kserve") if one["kind"] == "ServingRuntime")
    (service,) = (one for one in documents("kserve") if one["kind"] == "InferenceService")
    model, (container,) = service["spec"]["predictor"]["model"], runtime["spec"]["containers"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [one["name"] for one in runtime["spec"]["supportedModelFormats"]]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert container["name"] == "kserve-container"  # KServe mounts the export into this one
    (port,) = container["ports"]
    assert f"--port={port['containerPort']}" in container["args"]
    export = exported(trained(tmp_path / "m"), tmp_path / "e")
    with HeldPort() as held:
        here = {"{{.Name}}": service["metadata"]["name"], "/mnt/models": str(export)}
        here |= {f"--port={port['containerPort']}": f"--port={held.port}", "0.0.0.0": "127.0.0.1"}
        words = container["args"]
        for there, local in here.items():
            assert any(there in word for word in words)
            words = [word.replace(there, local) for word in words]
        child = ChildProcess("serve", [sys.executable, "-m", "shoal", *words], {}, lambda *_: None)
        try:
            end = time.monotonic() + TIMEOUT
            while "at http" not in child.last_output():
                assert time.monotonic() < end, child.last_output()
                time.sleep(0.05)
            for probe in ("readinessProbe", "livenessProbe"):
                assert ask(held.port, "GET", container[probe]["httpGet"]["path"])[0] == 200
            assert ask(held.port, "POST", "/v1/models/ctr:predict", b'{"instances": [{"keys": [1]}]}')[0] == 200
        finally:
            end_all([child], 0.0)


# --- a run of the commands ----------------------------------------------------------------------------------------


class Nodes:
    """The pods of a kustomization as processes of this machine."""

    def __init__(self, directory: str, folder: Path) -> None:
        self.pods = pods(directory)
        self.folder = folder
        self.children: list[ChildProcess] = []
        self.ports = [HeldPort() for _ in range(1 + self.pods["worker"].count)]
        self.address = self.ports[0].address  # of the scheduler
        make_keys(folder / "keys")
        for role, pod in self.pods.items():
            give_keys(folder / "keys", pod, folder / role)
        self.keys = Keys.load(folder / "keys", "worker")

    def start(self, role: str, index: int = 0, *more: str) -> ChildProcess:
        """Start the process of a pod; paths and addresses of the cluster are replaced by those of this machine."""
        pod = self.pods[role]
        variables = pod.variables(index, f"node-{index}")
        variables["SHOAL_CURVE"] = str(self.folder / role)
        if role == "worker":
            assert variables["SHOAL_METRICS_PORT"].startswith("0.0.0.0:")
            variables["SHOAL_METRICS_PORT"] = str(self.ports[1 + index].port)
        variables["SHOAL_SCHEDULER"] = self.address
        child = ChildProcess(f"{role} {index}", [*self._here(pod), *more], variables, lambda *_: None)
        self.children.append(child)
        return child

    def _here(self, pod: Pods) -> Iterator[str]:
        for word in pod.command():
            name, equals, _ = word.partition("=")
            if name in ("--scheduler", "--metrics-port"):
                yield f"{name}={self.address if name == '--scheduler' else '127.0.0.1:*'}"
            elif name == "--bind":
                yield f"--bind={self.address if pod.role == 'scheduler' else 'tcp://127.0.0.1:*'}"
            elif word == "/app/train.py":
                yield str(KUBERNETES / "program" / "train.py")
            elif equals and name in ("--journal", "--output"):
                yield f"{name}={self.folder}{word.partition('=')[2]}"
            else:
                yield word

    def status(self) -> StatusReply:
        with SchedulerClient(self.address, "observer", keys=self.keys) as client:
            return client.call(GetStatus(), StatusReply, TIMEOUT)

    def wait_until(self, holds: Callable[[StatusReply], bool]) -> StatusReply:
        """Wait until something holds of the status of the cluster."""
        deadline = time.monotonic() + TIMEOUT
        while not holds(status := self.status()):
            assert time.monotonic() < deadline, [status, *(child.last_output() for child in self.children)]
            time.sleep(0.05)
        return status


@contextlib.contextmanager
def nodes(directory: str, folder: Path) -> Iterator[Nodes]:
    made = Nodes(directory, folder)
    try:
        yield made
    finally:
        end_all(made.children, 0.0)
        for held in made.ports:
            held.close()


EPOCHS = 40  # 4 s on a quiet machine; the kills begin after the first one


def passes_of(worker: ChildProcess) -> int:
    """How many passes a worker's program has finished, by its output: heartbeats are rarer than passes."""
    return max(map(int, re.findall(r": pass (\d+) of", worker.last_output())), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("directory", long_but(["job"], WHOLE))
def test_the_commands_of_the_pods_train_a_model_while_pods_are_evicted_and_killed(directory, tmp_path):
    with nodes(directory, tmp_path) as cluster:
        bind = [] if cluster.pods["scheduler"].option("bind") else [f"--bind={cluster.address}"]
        scheduler = cluster.start("scheduler", 0, *bind)
        servers = [cluster.start("server", index) for index in range(cluster.pods["server"].count)]
        many = [f"--epochs={EPOCHS}", "--examples=8000", "--split-bytes=500000"]
        workers = [cluster.start("worker", index, *many) for index in range(cluster.pods["worker"].count)]
        cluster.wait_until(lambda _: all(passes_of(worker) for worker in workers))
        for held in cluster.ports[1:]:
            with urllib.request.urlopen(f"http://127.0.0.1:{held.port}/readyz", timeout=TIMEOUT) as reply:
                assert reply.read() == b"ready\n"
        servers[1].signal(signal.SIGKILL)  # its container is started again
        servers[1].process.wait(TIMEOUT)
        assert all(passes_of(worker) < EPOCHS for worker in workers), "the training ended before a server was killed"
        servers.append(cluster.start("server", 1))
        again = servers[-1].process.pid
        cluster.wait_until(lambda status: any(pid_of(server.about) == again for server in status.servers))
        scheduler.signal(signal.SIGTERM)  # its pod is evicted
        assert scheduler.process.wait(TIMEOUT) == 0
        assert all(passes_of(worker) < EPOCHS for worker in workers), "the training ended before the eviction"
        anew = cluster.start("scheduler", 0, *bind)
        for worker in workers:
            assert worker.process.wait(TIMEOUT) == 0, worker.last_output()
        status = cluster.status()
        assert status.generation == 2
        assert not status.lost
        assert {one.node for one in status.servers} == {f"node-{index}" for index in range(3)}
        assert main(["cluster", cluster.address, "stop", "--curve", str(tmp_path / "keys")]) == 0
        for child in (anew, *servers[:1], *servers[2:]):
            assert child.process.wait(TIMEOUT) == 0
    with shoal.LogisticRegression.load(next(tmp_path.glob("**/ctr"))) as model:
        assert len(model.table) > 1000


def test_a_secret_that_another_user_owns_may_be_readable_by_the_group(tmp_path, monkeypatch):
    make_keys(tmp_path / "keys")
    secret = tmp_path / "keys" / "worker.key_secret"
    secret.chmod(0o440)
    with pytest.raises(ValueError, match=r"can be read by others than its owner \(mode 0440\)"):
        Keys.load(tmp_path / "keys", "worker")
    monkeypatch.setattr(os, "getuid", lambda: secret.stat().st_uid + 1)
    assert Keys.load(tmp_path / "keys", "worker").secret
    secret.chmod(0o444)
    with pytest.raises(ValueError, match=r"can be read by others than its owner \(mode 0444\)"):
        Keys.load(tmp_path / "keys", "worker")
