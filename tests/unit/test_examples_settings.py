"""The example settings in config/, alone and in Kubernetes manifests, are valid."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from shipper.config.settings import Settings, literal_secrets, load_settings, require_endpoint

CONFIG = Path(__file__).parents[2] / "config"
FILES = sorted(CONFIG.rglob("*.toml"))
MANIFESTS = sorted(CONFIG.glob("kubernetes/*.yaml"))


def manifests(path: Path) -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all(path.read_text())}


def settings_of(path: Path, tmp_path: Path) -> Settings:
    if path.suffix == ".yaml":
        (text,) = manifests(path)["ConfigMap"]["data"].values()
        path = tmp_path / "shipper.toml"
        path.write_text(text)
    return load_settings(config_path=path, environ={})


def pod_of(path: Path) -> dict:
    documents = manifests(path)
    if "CronJob" in documents:
        return documents["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return documents["Deployment"]["spec"]["template"]["spec"]


def containers_of(path: Path) -> list[dict]:
    pod = pod_of(path)
    return [*pod.get("initContainers", ()), *pod["containers"]]


each_manifest = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)


@pytest.mark.parametrize("path", [*FILES, *MANIFESTS], ids=lambda path: path.relative_to(CONFIG))
def test_the_settings_are_valid_and_contain_no_secret(path: Path, tmp_path: Path):
    settings = settings_of(path, tmp_path)
    require_endpoint(settings, "intake")
    assert not literal_secrets(settings)


@each_manifest
def test_a_pod_is_granted_more_time_to_stop_than_shipper_takes(path: Path, tmp_path: Path):
    settings = settings_of(path, tmp_path)
    assert pod_of(path)["terminationGracePeriodSeconds"] > settings.delivery.drain_timeout_seconds


def test_the_sidecar_stops_after_the_application(tmp_path: Path):
    assert settings_of(CONFIG / "kubernetes/sidecar.yaml", tmp_path).delivery.drain == "until_idle"


@each_manifest
def test_the_admin_address_of_a_pod_is_open_only_to_scrapes(path: Path, tmp_path: Path):
    """The other ports are the application's, and stay open."""
    documents = manifests(path)
    policy = documents["NetworkPolicy"]["spec"]
    workload = documents.get("CronJob", documents.get("Deployment"))
    template = workload["spec"].get("jobTemplate", workload)["spec"]["template"]  # type: ignore[index]
    assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    opened = [port for container in containers_of(path) for port in container.get("ports", ())]
    ports = {port["name"]: port["containerPort"] for port in opened}
    rules = policy.get("ingress", [])
    named = {port["port"]: rule.get("from", []) for rule in rules for port in rule["ports"]}
    assert named.keys() == ports.keys(), "what no rule names is closed"
    listen = settings_of(path, tmp_path).admin.listen
    for name, sources in named.items():
        assert bool(sources) == listen.endswith(f":{ports[name]}") == (name == "shipper-admin"), name
        assert not sources or f"regex: {name}\n" in (CONFIG / "prometheus/prometheus.yml").read_text()


@each_manifest
def test_all_files_named_in_the_settings_of_a_pod_are_mounted(path: Path, tmp_path: Path):
    """Each path lies below a mount, the state below a writable one; secrets have the mode that fsGroup makes."""
    settings = settings_of(path, tmp_path)
    secrets = [settings.intake.subscription_key, settings.intake.token]
    secrets += [settings.input.kafka.password] if settings.input.kafka else []
    (container,) = (each for each in containers_of(path) if each["name"] == "shipper")
    mounts = {Path(mount["mountPath"]): mount for mount in container["volumeMounts"]}
    patterns = [Path(pattern) for pattern in settings.input.include]
    files = [Path(secret.file) for secret in secrets]  # type: ignore[union-attr, arg-type]
    named = [Path(argument) for argument in container["args"] if argument.startswith("/")]
    for file in [*patterns, *files, *named]:
        assert mounts.keys() & {file, *file.parents}, file
    if settings.input.kafka is None:
        assert settings.state.directory.parent in mounts, "a mount itself belongs to root, and fsGroup changes its mode"
        assert "readOnly" not in mounts[settings.state.directory.parent]
    assert all(secret.allow_group_readable for secret in secrets)  # type: ignore[union-attr]
    (mode,) = [volume["secret"]["defaultMode"] for volume in pod_of(path)["volumes"] if "secret" in volume]
    assert mode == 0o440


@each_manifest
def test_every_container_of_a_pod_is_confined(path: Path):
    assert pod_of(path)["securityContext"]["runAsNonRoot"] is True
    for container in containers_of(path):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("name", ["shipper.service", "shipper-backfill.service"])
def test_a_unit_is_granted_more_time_to_stop_than_shipper_takes(name: str, tmp_path: Path):
    settings = settings_of(CONFIG / "systemd/shipper.toml", tmp_path)
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", (CONFIG / "systemd" / name).read_text(), re.MULTILINE)
    assert int(seconds) > settings.delivery.drain_timeout_seconds


def test_the_state_directory_of_the_unit_is_that_of_the_settings(tmp_path: Path):
    settings = settings_of(CONFIG / "systemd/shipper.toml", tmp_path)
    (name,) = re.findall(r"^StateDirectory=(.*)$", (CONFIG / "systemd/shipper.service").read_text(), re.MULTILINE)
    assert settings.state.directory == Path("/var/lib", name)


def test_every_secret_in_the_settings_is_loaded_by_the_units():
    text = (CONFIG / "systemd/shipper.toml").read_text()
    names = set(re.findall(r'^[^#\n]*"systemd-creds", "cat", "(.*?)"', text, re.MULTILINE))
    assert len(names) == 2
    for path in CONFIG.glob("systemd/*.service"):
        assert set(re.findall(r"^LoadCredential=(.*)$", path.read_text(), re.MULTILINE)) == names, path


def test_the_report_section_in_the_settings_of_the_units_only_needs_uncommenting(tmp_path: Path):
    assert settings_of(CONFIG / "systemd/shipper.toml", tmp_path).report is None
    path = tmp_path / "shipper.toml"
    text = (CONFIG / "systemd/shipper.toml").read_text()
    path.write_text(re.sub(r"^#(?=\S|$)", "", text, flags=re.MULTILINE))
    assert require_endpoint(settings_of(path, tmp_path), "report").oauth2 is not None


def test_an_image_is_built_of_files_that_exist_and_are_sent_to_the_builder():
    root = CONFIG.parent
    lines = (CONFIG / "container/Containerfile").read_text().splitlines()
    copies = [line.split() for line in lines if line.startswith("COPY ") and "--from" not in line]
    sources = [name for words in copies for name in words[1:-1]]
    assert {"requirements.lock", "pyproject.toml", "shipper"} <= set(sources)
    assert all((root / name).exists() for name in sources), sources
    ignored = (CONFIG / "container/Containerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in sources} == {line for line in ignored if line.startswith("!")}


def test_the_lock_is_written_by_a_tool_that_the_lock_pins_and_hashes():
    root = CONFIG.parent
    # Lines with $(MAKE) are executed even in a dry run; they would build the native extension and install it anew.
    words = ["make", "--dry-run", "--always-make", "lock", "MAKE=true"]
    recipe = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True, timeout=30).stdout
    install, write = recipe.index("pip install"), recipe.index(".venv/bin/uv pip compile")
    assert "--require-hashes -r requirements.lock" in recipe[install:write]
    assert re.search(r"^uv==[0-9.]+ \\\n    --hash=sha256:[0-9a-f]{64}", (root / "requirements.lock").read_text(), re.M)


def test_every_example_says_at_its_head_what_it_is_for():
    for path in CONFIG.rglob("*"):
        if path.is_file() and path.suffix != ".json":
            assert path.read_text().startswith("# "), path
