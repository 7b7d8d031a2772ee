"""The manifests of deploy/kubernetes: read, checked against schemas, and their containers as local commands.

The schemas of Kubernetes' own kinds are those that are published (kubernetes-validate). Those of JobSet, KServe,
KubeRay and Volcano are here, of the fields that the manifests use; what these take over from Kubernetes, such as
templates of pods and jobs, is checked against Kubernetes' schema.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paths import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
VERSION = "1.33"
Document = dict[str, Any]


def documents(directory: str) -> list[Document]:
    """The objects that a kustomization makes, as far as ours use kustomize."""
    yaml = pytest.importorskip("yaml")
    folder = KUBERNETES / directory
    made = []
    with (folder / "kustomization.yaml").open() as file:
        rules = yaml.safe_load(file)
    unknown = rules.keys() - {
        "apiVersion",
        "kind",
        "resources",
        "labels",
        "images",
        "configMapGenerator",
        "generatorOptions",
    }
    assert not unknown, f"{folder}: this reader does not know {unknown}"
    for resource in rules.get("resources", ()):
        path = (folder / resource).resolve()
        if path.is_dir():
            made += documents(str(path.relative_to(KUBERNETES)))
        else:
            with path.open() as file:
                made += [one for one in yaml.safe_load_all(file) if one is not None]
    for generated in rules.get("configMapGenerator", ()):
        data = {name: (folder / name).read_text() for name in generated["files"]}
        made.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generated["name"]}, "data": data})
    return made


# --- schemas --------------------------------------------------------------------------------------------------------

ANY: dict[str, Any] = {}  # checked otherwise
TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}


def record(required: str = "", **fields: Any) -> dict[str, Any]:
    """An object of these fields and no others."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def array(of: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, **more}


def one_of(words: str) -> dict[str, Any]:
    return {"enum": words.split()}


METADATA = record(name=TEXT, labels={"type": "object", "additionalProperties": TEXT}, annotations={"type": "object"})


def custom(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return record(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=METADATA,
        spec=spec,
    )


JOBSET = custom(
    "jobset.x-k8s.io/v1alpha2",
    "JobSet",
    record(
        "replicatedJobs",
        network=record(
            enableDNSHostnames={"type": "boolean"}, publishNotReadyAddresses={"type": "boolean"}, subdomain=TEXT
        ),
        successPolicy=record("operator", operator=one_of("All Any"), targetReplicatedJobs=array(TEXT)),
        failurePolicy=record(
            maxRestarts=COUNT,
            restartStrategy=one_of("Recreate BlockingRecreate"),
            rules=array(
                record(
                    "name action",
                    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    action=one_of("FailJobSet RestartJobSet RestartJobSetAndIgnoreMaxRestarts"),
                    onJobFailureReasons=array(TEXT),
                    targetReplicatedJobs=array(TEXT),
                )
            ),
        ),
        replicatedJobs=array(record("name template", name=TEXT, replicas=COUNT, template=ANY), minItems=1),
    ),
)

_EVENTS = (
    "* PodPending PodRunning PodFailed PodEvicted Unknown TaskCompleted OutOfSync CommandIssued JobUpdated TaskFailed"
)
_POLICIES = array(
    record(
        "event action",
        event=one_of(_EVENTS),
        action=one_of("AbortJob RestartJob RestartTask RestartPod TerminateJob CompleteJob ResumeJob"),
    )
)
VOLCANO = custom(
    "batch.volcano.sh/v1alpha1",
    "Job",
    record(
        "schedulerName tasks",
        schedulerName=TEXT,
        minAvailable=COUNT,
        maxRetry=COUNT,
        queue=TEXT,
        plugins={"type": "object", "additionalProperties": array(TEXT)},
        policies=_POLICIES,
        tasks=array(
            record(
                "name replicas template",
                name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
                replicas=COUNT,
                minAvailable=COUNT,
                maxRetry=COUNT,
                policies=_POLICIES,
                template=ANY,
            ),
            minItems=1,
        ),
    ),
)

_RAY_PARAMETERS = {"type": "object", "additionalProperties": TEXT}
RAYJOB = custom(
    "ray.io/v1",
    "RayJob",
    record(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        activeDeadlineSeconds=COUNT,
        backoffLimit=COUNT,
        submissionMode=one_of("K8sJobMode HTTPMode InteractiveMode SidecarMode"),
        runtimeEnvYAML=TEXT,
        rayClusterSpec=record(
            "headGroupSpec",
            rayVersion=TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=record("template", serviceType=TEXT, rayStartParams=_RAY_PARAMETERS, template=ANY),
            workerGroupSpecs=array(
                record(
                    "groupName template",
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=_RAY_PARAMETERS,
                    template=ANY,
                )
            ),
        ),
    ),
)

SERVING_RUNTIME = custom(
    "serving.kserve.io/v1alpha1",
    "ServingRuntime",
    record(
        "containers supportedModelFormats",
        annotations={"type": "object", "additionalProperties": TEXT},
        supportedModelFormats=array(
            record("name", name=TEXT, version=TEXT, autoSelect={"type": "boolean"}, priority=COUNT), minItems=1
        ),
        protocolVersions={"type": "array", "items": one_of("v1 v2 grpc-v1 grpc-v2"), "minItems": 1},
        containers=ANY,
        volumes=ANY,
    ),
)
INFERENCE_SERVICE = custom(
    "serving.kserve.io/v1beta1",
    "InferenceService",
    record(
        "predictor",
        predictor=record(
            "model",
            minReplicas=COUNT,
            maxReplicas=COUNT,
            model=record(
                "modelFormat storageUri",
                modelFormat=record("name", name=TEXT, version=TEXT),
                protocolVersion=one_of("v1 v2 grpc-v1 grpc-v2"),
                runtime=TEXT,
                storageUri={"type": "string", "pattern": "^(s3|gs|https|pvc|hf)://"},
            ),
        ),
    ),
)
CUSTOM = {
    "InferenceService": INFERENCE_SERVICE,
    "JobSet": JOBSET,
    "RayJob": RAYJOB,
    "ServingRuntime": SERVING_RUNTIME,
    "batch.volcano.sh/v1alpha1": VOLCANO,
}


def as_kubernetes(document: Document) -> Iterator[Document]:
    """The objects of Kubernetes' own kinds that an object is, or contains."""

    def template(of: Document) -> Document:
        metadata = {"name": "template"}
        return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": of}

    spec = document.get("spec", {})
    if document["kind"] == "JobSet":
        for one in spec["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one["name"]}, **one["template"]}
    elif document["apiVersion"].startswith("batch.volcano.sh/"):
        yield from (template(task["template"]) for task in spec["tasks"])
    elif document["kind"] == "RayJob":
        cluster = spec["rayClusterSpec"]
        yield from (template(group["template"]) for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]])
    elif document["kind"] == "ServingRuntime":
        yield template({"spec": {"containers": spec["containers"]}})
    elif document["kind"] != "InferenceService":
        yield document


def check(document: Document) -> None:
    """Check an object against its schemas."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    jsonschema = pytest.importorskip("jsonschema")
    own = CUSTOM.get(document["kind"]) or CUSTOM.get(document["apiVersion"])
    if own is not None:
        jsonschema.validate(document, own)
    for one in as_kubernetes(document):
        kubernetes_validate.validate(one, VERSION, strict=True)


# --- pods -------------------------------------------------------------------------------------------------------------


@dataclass
class Pods:
    """Equal pods: the template, how many there are, and what their controller sets in their environment."""

    role: str
    count: int
    spec: Document
    labels: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def container(self) -> Document:
        (one,) = self.spec["containers"]
        return one

    def option(self, name: str) -> str | None:
        """The value of an option among the arguments."""
        found = [text.partition("=")[2] for text in self.container.get("args", ()) if text.startswith(f"--{name}=")]
        return found[0] if found else None

    def variables(self, index: int, node: str) -> dict[str, str]:
        """The environment of a pod."""
        from_fields = {
            "spec.nodeName": node,
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        }
        made = {name: value.replace("INDEX", str(index)) for name, value in self.environment.items()}
        for one in self.container.get("env", ()):
            made[one["name"]] = (
                one["value"] if "value" in one else from_fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            )
        return made

    def secrets(self) -> list[str]:
        """The keys that are mounted."""
        (volume,) = (one for one in self.spec["volumes"] if "secret" in one)
        return [item["path"] for item in volume["secret"]["items"]]

    def command(self) -> list[str]:
        """The command, with the image's entry point."""
        container = self.container
        entry = container.get("command", ["shoal"])
        words = [sys.executable, "-m", "shoal"] if entry == ["shoal"] else [sys.executable, *entry[1:]]
        assert entry[0] in ("shoal", "python")
        return [*words, *container.get("args", ())]


def pods(directory: str) -> dict[str, Pods]:
    """The pods of a kustomization, by role."""
    found = []
    for document in documents(directory):
        kind, spec = document["kind"], document.get("spec", {})
        if kind == "StatefulSet":
            found.append(_pods(spec["replicas"], spec["template"]))
        elif document["apiVersion"] == "batch/v1":
            found.append(_pods(spec["completions"], spec["template"]))
        elif kind == "JobSet":
            jobs = [one["template"]["spec"] for one in spec["replicatedJobs"]]
            found += [_pods(job["completions"], job["template"]) for job in jobs]
        elif kind == "Job":
            counts = {f"VC_{task['name'].upper()}_NUM": str(task["replicas"]) for task in spec["tasks"]}
            hosts = {"VC_SCHEDULER_HOSTS": f"{document['metadata']['name']}-scheduler-0.ctr"}
            environment = {**counts, **hosts, "VC_TASK_INDEX": "INDEX"}
            found += [_pods(task["replicas"], task["template"], environment) for task in spec["tasks"]]
    return {one.role: one for one in found}


def _pods(count: int, template: Document, environment: Mapping[str, str] | None = None) -> Pods:
    spec = template["spec"]
    return Pods(spec["containers"][0]["name"], count, spec, template["metadata"]["labels"], environment or {})


def give_keys(keys: Path, pod: Pods, target: Path) -> Path:
    """Copy the keys that a pod mounts."""
    target.mkdir()
    for name in pod.secrets():
        shutil.copy(keys / name, target / name)
    return target
