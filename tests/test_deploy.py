"""Keeps the files of deploy/ and docs/operations.md up to date: their command lines, settings, metrics and
permissions must be those of the code, and Kubernetes must accept its files.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from ckpt_async import Uploader, cli, restore
from ckpt_async.cli.output import UsageError
from ckpt_async.core import keys, settings
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.retention import KeepLast
from ckpt_async.core.settings import Settings
from ckpt_async.monitor.definitions import DEFINITIONS, SWEEPER_DEFINITIONS, Definition
from ckpt_async.protocol.sweep_plan import Ages
from ckpt_async.transfer.patient import PatientStore
from tests.kustomize import build
from tests.kustomize import containers as containers_of
from tests.stores.memory import MemoryStore
from tests.stores.misbehaving import Meddled
from tests.sweep.trainers import Trainers
from tests.sweep.world import World

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd/ckpt-async-sweeper.service"
ENVIRONMENT = DEPLOY / "systemd/sweeper.env"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted((KUBERNETES / "overlays").iterdir())
APPLIED = [*OVERLAYS, KUBERNETES / "node-sweeper"]
BATCHES = sorted((DEPLOY / "slurm").glob("*.sbatch"))
SCRIPTS = [*BATCHES, DEPLOY / "torchrun/node.sh"]
ALERTS = DEPLOY / "prometheus/alerts.yaml"
ALERTS_TEST = DEPLOY / "prometheus/alerts_test.yaml"
OPERATIONS = ROOT / "docs/operations.md"


def environment_of(path: Path) -> dict[str, str]:
    lines = (line for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield every `ckpt-async …` command that users are told to run, and where it is written."""
    (started,) = re.findall(r"^ExecStart=\S+/ckpt-async (.*)$", UNIT.read_text(), re.MULTILINE)
    folders = environment_of(ENVIRONMENT)["SWEEP_FOLDERS"]
    yield UNIT.name, shlex.split(started.replace("$SWEEP_FOLDERS", folders))
    for where, each in containers():
        if each["image"].startswith("registry.example.com/ckpt-async:"):
            shells = [
                each.get("command", ()),
                *(hook["exec"]["command"] for hook in each.get("lifecycle", {}).values()),
            ]
            for command in re.findall(
                r"(?:while|exec) ckpt-async ([^;]*)", "\n".join(line[-1] for line in shells if line)
            ):
                yield where, shlex.split(command)
            if not each.get("command"):
                yield where, each["args"]
    for path in SCRIPTS:
        for command in re.findall(r" ckpt-async (.*)$", path.read_text(), re.MULTILINE):
            yield path.name, shlex.split(command)
    for command in re.findall(r"^(?:\$ )?ckpt-async (.*)$", OPERATIONS.read_text(), re.MULTILINE):
        yield OPERATIONS.name, shlex.split(command, comments=True)


def test_command_lines_parse() -> None:
    found = list(command_lines())
    for where, arguments in found:
        try:
            cli._parser().parse_args(arguments)
        except UsageError as error:
            pytest.fail(f"{where}: ckpt-async {shlex.join(arguments)}: {error}")
    files = (*APPLIED, *SCRIPTS)
    assert {where for where, _ in found} == {UNIT.name, OPERATIONS.name, *(path.name for path in files)}
    assert {arguments[0] for _, arguments in found} >= {
        "sweep",
        "drain",
        "verify",
        "prune",
        "status",
        "watch",
    }


def test_environment_files_set_known_settings() -> None:
    """A variable that no code reads would look like a setting that has an effect."""
    given = environment_of(ENVIRONMENT)
    written = [
        {one["name"]: one["value"] for one in each.get("env", ()) if one["name"].startswith("CKPT_")}
        for _, each in containers()
    ]
    maps = [each["data"] for path in OVERLAYS for each in build(path) if each["kind"] == "ConfigMap"]
    assert len(maps) == len(OVERLAYS)
    assert all(each.pop("REMOTE") for each in maps)
    for each in (given, *maps, *filter(None, written)):
        assert each
        ours = {name for name in each if name.startswith(settings.ENVIRONMENT_PREFIX)}
        known = {
            settings.ENVIRONMENT_PREFIX + name.upper() for name in settings.Settings.__dataclass_fields__
        }
        assert ours <= known
        settings.load({}, each)
    assert settings.load({}, given).remote_retention


@pytest.mark.parametrize("path", APPLIED, ids=lambda path: path.name)
def test_what_is_applied_fits_together(path: Path) -> None:
    """A pod that refers to an object by name fails if that is not applied with it, or if a placeholder is left."""
    objects = build(path)
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    assert len(names) == len(objects)
    assert {each["metadata"]["namespace"] for each in objects} == {"training"}
    assert not re.search(r"BUCKET|PREFIX", json.dumps(objects))
    for pod in pods(objects):
        volumes = {each["name"] for each in pod.get("volumes", ())}
        assert ("ServiceAccount", pod["serviceAccountName"]) in names
        for each in containers_of(pod):
            assert ":" in each["image"]
            assert {mount["name"] for mount in each.get("volumeMounts", ())} <= volumes
            assert {("ConfigMap", one["configMapRef"]["name"]) for one in each.get("envFrom", ())} <= names
            used = set(re.findall(r"\$\(?([A-Z]+)\b", json.dumps([each.get("command"), each.get("args")])))
            env = {one["name"] for one in each.get("env", ())}
            assert used <= (env | {"REMOTE"} if each.get("envFrom") else env)


def test_kubectl_builds_what_these_tests_look_at() -> None:
    """These tests look at what tests/kustomize.py builds, so it is compared with the real kubectl if there is one."""
    kubectl = shutil.which("kubectl")
    for path in [*APPLIED, KUBERNETES / "base"] if kubectl else []:
        done = subprocess.run([str(kubectl), "kustomize", path], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), path  # deprecated fields are reported there

        def named(objects: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
            return {(each["kind"], each["metadata"]["name"]): each for each in objects}

        assert named(yaml.safe_load_all(done.stdout)) == named(build(path)), path


def test_every_manifest_belongs_to_something_that_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[Path] = set()
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read.add(path.resolve()) or read_text(path))
    for path in APPLIED:
        build(path)
    assert read == set(KUBERNETES.rglob("*.yaml"))


@pytest.mark.parametrize(
    ("file", "text", "other"),
    [
        ("base/kustomization.yaml", "resources:", "bases:"),
        ("overlays/job/kustomization.yaml", "images:", "imagez:"),
    ],
)
def test_a_field_that_the_loader_does_not_know_is_refused(
    tmp_path: Path, file: str, text: str, other: str
) -> None:
    shutil.copytree(KUBERNETES, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text((tmp_path / file).read_text().replace(text, other))
    with pytest.raises(KeyError, match=other.strip(":")):
        build(tmp_path / "overlays/job")


# The fields that our JobSet uses, because its CRD has 800 kB. The file was also checked against the CRD by
# hand.
OF_JOBSET = {"failurePolicy": {"maxRestarts"}, "replicatedJobs": {"name", "replicas", "template"}}


@pytest.mark.parametrize("path", APPLIED, ids=lambda path: path.name)
def test_manifests_follow_the_schemas_of_kubernetes(path: Path) -> None:
    """Unknown fields are errors, because Kubernetes silently ignores a misspelt one."""
    for each in build(path):
        manifest = of_jobset(each) if each["kind"] == "JobSet" else each
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
        part = "spec" if "spec" in manifest else "metadata"
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(
                {**manifest, part: {**manifest[part], "misspelt": 1}}, "1.33.0", strict=True
            )


def of_jobset(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the Job that the JobSet creates."""
    spec = manifest["spec"]
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert spec.keys() == OF_JOBSET.keys()
    assert spec["failurePolicy"].keys() == OF_JOBSET["failurePolicy"]
    (group,) = spec["replicatedJobs"]
    assert group.keys() == OF_JOBSET["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **group["template"]}


def pods(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the specification of every pod in `node`."""
    below = node if isinstance(node, list) else node.values() if isinstance(node, dict) else ()
    if isinstance(node, dict) and "containers" in node:
        yield node
    for each in below:
        yield from pods(each)


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every container that is applied, with the folder it is in."""
    return ((path.name, each) for path in APPLIED for each in containers_of(build(path)))


def test_probes_ask_the_page_and_not_the_store() -> None:
    """A liveness probe that depended on the store would end training whenever the store is unavailable."""
    probes = {}
    for where, each in containers():
        ports = {port["name"]: port["containerPort"] for port in each.get("ports", ())}
        for name in ("livenessProbe", "startupProbe", "readinessProbe"):
            if probe := each.get(name):
                probes[where, each["name"], name] = probe["httpGet"]["path"]
                assert probe["httpGet"]["port"] in ports, where
                assert str(ports[probe["httpGet"]["port"]]) in (each.get("args") or ["9400"]), where
    assert probes.keys() == {
        ("jobset", "sweeper", "livenessProbe"),
        ("job", "sweeper", "livenessProbe"),
        ("node-sweeper", "sweeper", "livenessProbe"),
    }
    assert set(probes.values()) == {"/healthz"}


@pytest.mark.parametrize("path", APPLIED, ids=lambda path: path.name)
def test_pods_meet_the_restricted_standard(path: Path) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards, level "restricted", for what our files use.
    The node's sweeper needs a hostPath and a container that gives it to the trainers' user, and nothing else more.
    """
    is_of_node = path.name == "node-sweeper"
    objects = build(path)
    for each in objects:
        assert each["kind"] != "ServiceAccount" or each["automountServiceAccountToken"] is False
    for pod in pods(objects):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert {kind for each in pod.get("volumes", ()) for kind in each} - {"name", "emptyDir"} <= (
            {"hostPath"} if is_of_node else set()
        )
        of_pod = pod["securityContext"]
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in containers_of(pod):
            own = each["securityContext"]
            is_owner = is_of_node and each["name"] == "owner"
            assert is_owner or {**of_pod, **own}["runAsNonRoot"] is True
            assert is_owner or {**of_pod, **own}["runAsUser"] > 0
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]} | ({"add": ["CHOWN"]} if is_owner else {})
            assert "privileged" not in own
            assert each["name"] == "trainer" or own["readOnlyRootFilesystem"] is True
            assert all("hostPort" not in port for port in each.get("ports", ()))


def test_only_the_run_and_its_monitoring_reach_the_pods() -> None:
    used = {
        port["containerPort"]
        for _, each in containers()
        for port in each.get("ports", ())
        if port["name"] != "rendezvous"
    }
    for path in OVERLAYS:
        (policy,) = (each["spec"] for each in build(path) if each["kind"] == "NetworkPolicy")
        own, scrape = policy["ingress"]
        assert (policy["podSelector"], own) == ({}, {"from": [{"podSelector": {}}]})
        assert {each["port"] for each in scrape["ports"]} == used


def test_a_jobset_has_as_many_nodes_for_torchrun_as_pods() -> None:
    (jobset,) = (each for each in build(KUBERNETES / "overlays/jobset") if each["kind"] == "JobSet")
    job = of_jobset(jobset)["spec"]
    (trainer,) = job["template"]["spec"]["containers"]
    (nodes,) = (each["value"] for each in trainer["env"] if each["name"] == "NODES")
    assert job["parallelism"] == job["completions"] == int(nodes)
    assert "--nnodes=$(NODES)" in trainer["command"]
    (group,) = jobset["spec"]["replicatedJobs"]
    assert f"--rdzv-endpoint=$(JOBSET)-{group['name']}-0-0.$(JOBSET):29400" in trainer["command"]


@pytest.mark.parametrize("path", [*SCRIPTS, DEPLOY / "ray/submit.sh"], ids=lambda path: path.name)
def test_scripts_are_bash_and_say_how_they_are_called(path: Path) -> None:
    """The scripts run for real in `./dev slurm`, `./dev elastic` and `./dev compat ray`."""
    done = subprocess.run(["bash", path], capture_output=True, text=True, timeout=60, env={})
    assert done.returncode
    assert f"usage: {'sbatch ' if path in BATCHES else ''}{path.name} FOLDER" in done.stderr


def test_batch_scripts_end_within_the_time_that_slurm_leaves_them() -> None:
    """Flush, wait and drain must fit between the signal and the end of the job. The scripts run under a real Slurm in
    `./dev slurm`.
    """
    assert [path.name for path in BATCHES] == ["multi-node.sbatch", "single-node.sbatch"]
    for path in BATCHES:
        text = path.read_text()
        (left_s,) = map(int, re.findall(r"^#SBATCH --signal=TERM@(\d+)$", text, re.MULTILINE))
        (flush_s,) = map(int, re.findall(r"SIGTERM_FLUSH_S:-(\d+)", text))
        (drain_s,) = map(int, re.findall(r"ckpt-async drain .*--timeout (\d+)", text))
        (wait_s,) = map(int, re.findall(r"--wait=(\d+)", text) or [flush_s])
        assert flush_s <= wait_s
        assert flush_s + wait_s + drain_s < left_s


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """systemd itself checks the unit where it is available; its sections and the paths of its files are always
    checked.
    """
    text = UNIT.read_text()
    assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == ["Unit", "Service", "Install"]
    (writable,) = re.findall(r"^ReadWritePaths=(.*)$", text, re.MULTILINE)
    assert all(
        folder.startswith(f"{writable}/") for folder in environment_of(ENVIRONMENT)["SWEEP_FOLDERS"].split()
    )
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        unit = tmp_path / UNIT.name
        unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", text, flags=re.MULTILINE))
        done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, timeout=60)
        assert UNIT.name not in done.stdout + done.stderr
        done = subprocess.run(
            [analyze, "security", "--offline=true", "--threshold=30", str(unit)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if "unrecognized option" not in done.stderr:  # before systemd 250
            assert done.returncode == 0, done.stdout


def test_the_dockerfile_copies_existing_files() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    assert {"ckpt_async", "pyproject.toml"} <= {name for line in copied for name in line.split()}
    assert all((ROOT / name).exists() for line in copied for name in line.split())
    assert re.fullmatch(r".*@sha256:[0-9a-f]{64}", re.findall(r"^ARG PYTHON=(.*)$", text, re.MULTILINE)[0])
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${PYTHON}"}
    assert "torch" not in text.partition("\n")[2].replace("without torch", "")


def test_the_packages_of_the_image_are_pinned_and_suffice() -> None:
    """pip refuses the file if a package that is needed is missing or has no hash: it was installed from it once."""
    text = (DEPLOY / "requirements.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+) \\\n +--hash=sha256:[0-9a-f]{64}", text, re.MULTILINE))
    assert len(pinned) == len(re.findall(r"^\w", text, re.MULTILINE))
    for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        needed = Requirement(each)
        assert needed.specifier.contains(pinned[needed.name]), each


def test_alerts_use_existing_metrics() -> None:
    """An alert on a metric that nothing exports never fires."""
    known = {each.name: each for each in (*DEFINITIONS, *SWEEPER_DEFINITIONS)}
    known |= {f"{each.name}_count": each for each in known.values() if each.kind == "histogram"}
    text = ALERTS.read_text()
    used = re.findall(
        r"(ckpt_async_\w+)(\{[^}]*\})?", re.sub(r"^ *- (name|alert):.*$", "", text, flags=re.MULTILINE)
    )
    assert len({name for name, _ in used}) >= 12
    for name, matchers in used:
        assert name in known, name
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
            assert set(values.split("|")) <= set(known[name].labels[label]), (name, matchers)
    for expression in re.split(r"^ *- alert: ", text, flags=re.MULTILINE)[1:]:
        labels = set(re.findall(r"\$labels\.(\w+)", expression)) - {"instance", "node"}
        names = {name for name, _ in re.findall(r"(ckpt_async_\w+)(\{)?", expression.partition("expr:")[2])}
        assert all(_has_labels(known[name], labels) for name in names), expression


@pytest.mark.fault("O6", "O11")
def test_every_alert_fires_and_resolves() -> None:
    """Prometheus' own rule tests run deploy/prometheus/alerts_test.yaml; `./dev alerts` uses a real server."""
    text = ALERTS_TEST.read_text()
    for alert in re.findall(r"- alert: (\w+)", ALERTS.read_text()):
        looks = re.findall(rf"(?m)^.*alertname: {alert}\b.*(?:\n +exp_alerts:)?", text)
        kinds = ["fires" if "exp_alerts" in look else "does not" for look in looks]
        assert kinds[0] == kinds[-1] == "does not", alert
        assert "fires" in kinds, alert
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here and could not be had: ./dev alerts says how to get it")
    done = subprocess.run(
        [promtool, "test", "rules", ALERTS_TEST], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _has_labels(definition: Definition, labels: set[str]) -> bool:
    return labels <= definition.labels.keys()


def test_every_alert_is_documented() -> None:
    """A person woken by an alert must be able to look up what to do."""
    for alert in re.findall(r"- alert: (\w+)", ALERTS.read_text()):
        assert f"`{alert}`" in OPERATIONS.read_text(), alert


# --- rights ------------------------------------------------------------------------------------------------

# The permission that each of our requests needs (S3 user guide, "Required permissions for Amazon S3 API
# operations").
ACTIONS = {
    "put": "s3:PutObject",
    "create_multipart": "s3:PutObject",
    "put_part": "s3:PutObject",
    "complete_multipart": "s3:PutObject",
    "get": "s3:GetObject",
    "get_range": "s3:GetObject",
    "head": "s3:GetObject",
    "delete": "s3:DeleteObject",
    "delete_if": "s3:DeleteObject",
    "copy": "s3:GetObject",  # for the source; the destination needs the permission of `put`
    "list_parts": "s3:ListMultipartUploadParts",
    "abort_multipart": "s3:AbortMultipartUpload",
    "list": "s3:ListBucket",
    "list_multiparts": "s3:ListBucketMultipartUploads",
}
OF_BUCKET = {"list", "list_multiparts"}
# The requests that opening a store for writing makes (`S3Store.open`), which a memory store does not.
PROBE = {(operation, f"{keys.PROBES}x") for operation in ("put", "get", "delete")}


class Recorded(Meddled):
    """A store that records every request with its key."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: set[tuple[str, str]] = set()

    def __getattr__(self, operation: str) -> Callable[..., Awaitable[Any]]:
        request = super().__getattr__(operation)

        async def recorded(*args: Any, **kwargs: Any) -> Any:
            if operation in ACTIONS:
                named = [args[0]] if isinstance(args[0], str) else args[0]
                self.requests |= {(operation, key) for key in named}
            return await request(*args, **kwargs)

        return recorded


def refused(role: str, requests: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the requests that the role's policy does not allow."""
    policy = json.loads((DEPLOY / "iam" / f"{role}.json").read_text())
    allowed = {
        (action, resource)
        for each in policy["Statement"]
        for action in each["Action"]
        for resource in each["Resource"]
        if each["Effect"] == "Allow"
    }

    def is_allowed(operation: str, key: str) -> bool:
        wanted = "arn:aws:s3:::BUCKET" if operation in OF_BUCKET else f"arn:aws:s3:::BUCKET/PREFIX/RUN/{key}"
        return any(action == ACTIONS[operation] and fnmatchcase(wanted, each) for action, each in allowed)

    return sorted(each for each in requests if not is_allowed(*each))


def of_kind(requests: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the same requests for a kind of checkpoints, which is stored below the run."""
    return {(operation, f"kinds/weights/{key}") for operation, key in requests}


def test_each_roles_permissions_suffice_and_are_minimal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    """Two launches of a trainer, a restore and a sweep: each of their requests is checked against the policies of
    deploy/iam.
    """
    store = Recorded()
    monkeypatch.setattr("ckpt_async.transfer.patient.open_store", lambda *_, **__: store)
    for generation in (1, 2):
        folder = tmp_path / "folder"
        with Uploader(
            folder,
            "memory://test",
            rank=0,
            world_size=1,
            generation=generation,
            part_size_bytes=5 << 20,
            publish_copies=True,
        ) as uploader:
            path = uploader.folder / f"step-{generation}/model.bin"
            path.parent.mkdir()
            path.write_bytes(b"x" * (6 << 20))
            (path.parent / "small.bin").write_bytes(b"x")
            uploader.enqueue(path.parent, generation, publish_as=f"exact/{generation}")
            uploader.seal(generation)
            uploader.wait(generation, timeout_s=60)
    trainer = store.requests | PROBE | {("list_parts", "ckpt/step-1.g1/model.bin")}
    asked = {operation for operation, _ in trainer}
    assert asked >= {"put", "put_part", "complete_multipart", "list", "get", "copy"}
    assert refused("trainer", trainer | of_kind(trainer)) == []
    assert refused("sweeper", trainer | of_kind(trainer)) == [], "it finishes a trainer's uploads"
    assert {operation for operation, _ in refused("reader", trainer)} >= {"put", "put_part"}

    store.requests = set()
    found = restore.find("memory://test")
    assert found is not None
    restore.fetch(found, tmp_path / "restored")
    assert {operation for operation, _ in store.requests} >= {"put", "get_range", "delete", "list"}
    marking = store.requests | {("put", keys.damage_key(CheckpointId(1, 1)))}
    marking |= of_kind(marking)
    assert refused("reader", marking) == refused("trainer", marking) == []

    async def sweep() -> set[tuple[str, str]]:
        world = await World.begun(1, 2)
        await world.start(2)
        await world.store.create_multipart(keys.data_key("step-1", 1, "rank-9.pt"))
        store = Recorded()
        store._store = MemoryStore(world.bucket)
        patient: Any = PatientStore(store, Settings())  # type: ignore[arg-type]
        await world.sweeper(KeepLast(1), Ages(), patient).run(is_dry_run=False)
        return store.requests

    swept = run(sweep())
    assert {operation for operation, _ in swept} >= {"delete", "abort_multipart", "list_multiparts", "put"}
    assert refused("sweeper", swept) == []
    assert {operation for operation, _ in refused("trainer", swept)} >= {"delete", "abort_multipart"}


@pytest.mark.fault("O4")
def test_a_sidecar_needs_only_a_trainers_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainers: Trainers
) -> None:
    """The sidecar has the trainer's role and finishes what the trainer left. It must not try anything that the role
    denies: no listing of multipart uploads, no pruning, no deletion. Its command line is the manifest's.
    """
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/remote"
    trainers.die(folder, remote, 1, 2, sealed=(1,))
    store = Recorded()
    monkeypatch.setattr("ckpt_async.transfer.patient.open_store", lambda *_, **__: store)
    monkeypatch.setenv("CKPT_ASYNC_REMOTE_RETENTION", "last=1")  # the trainer's
    (arguments,) = (
        each
        for path, each in command_lines()
        if path == "job" and "/checkpoints" in each[:2] and each[0] == "sweep"
    )
    assert arguments[1:4] == ["/checkpoints", "--interval", "60"]
    assert arguments[arguments.index("--only-remote") + 1] == "$(REMOTE)"
    given = [each.replace("$(REMOTE)", remote) for each in arguments]
    once = ["sweep", str(folder), *given[4 : given.index("--metrics-port")]]
    assert cli.main(once) == 0
    assert store.keys(keys.DECISIONS) == [keys.decision_key(CheckpointId(1, step)) for step in (1, 2)]
    assert ("put", keys.receipt_key(CheckpointId(1, 1), 0)) in store.requests
    assert refused("trainer", store.requests) == []
    for refused_with in (["--keep", "last=1"], ["--remote", remote], ["--verify"]):
        assert cli.main([*once, *refused_with]) == 2


def test_lifecycle_rule_only_aborts_uploads_older_than_the_sweepers_limit() -> None:
    """A rule that expired objects would delete shards of committed checkpoints."""
    (rule,) = json.loads((DEPLOY / "iam/lifecycle.json").read_text())["Rules"]
    assert rule.keys() == {"ID", "Status", "Filter", "AbortIncompleteMultipartUpload"}
    days = rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
    assert days * 24 * 3600 > settings.Settings().abandon_newest_after_s
