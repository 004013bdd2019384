"""The files to deploy with: each by its own schema, and what they say by the code that reads it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose
from real_broker import EXECUTABLE

from online.config import load_config
from online.nats_config import StreamLimits
from online.plugin_config import is_enabled, read_config
from recipes import probe_log, serve
from recipes.cli import parse

DEPLOY = Path(__file__).parents[2] / "recipes" / "deploy"
KUBERNETES_VERSION = "1.31"


def manifests() -> list[dict[str, Any]]:
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [manifest for file in files for manifest in yaml.safe_load_all(file.read_text())]


def manifest(kind: str, name: str) -> dict[str, Any]:
    return next(m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name))


def container(kind: str, name: str) -> dict[str, Any]:
    (only,) = manifest(kind, name)["spec"]["template"]["spec"]["containers"]
    return only


def compose() -> dict[str, Any]:
    """As compose reads it: variables replaced, anchors merged."""
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{MODELS[^}]*\}", "/models", text))


@pytest.mark.parametrize("manifest", manifests(), ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_every_manifest_is_one_of_kubernetes(manifest):
    kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_a_manifest_with_a_mistake_is_found():
    broken = manifest("Deployment", "vllm")
    broken["spec"]["template"]["spec"]["containers"][0]["imagee"] = "redraft"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES_VERSION, strict=True)


def test_the_compose_file_is_one():
    text = yaml.safe_dump(compose())
    assert set(PyCompose.from_yaml(text).service_names()) == {"vllm", "learner", "log", "prometheus", "grafana"}
    with pytest.raises(ValueError, match="restrat"):
        PyCompose.from_yaml(text.replace("restart: unless-stopped", "restrat: unless-stopped"))


def test_every_file_that_compose_mounts_is_there():
    for service in compose()["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).resolve().is_file(), source


def test_the_learner_of_either_reads_its_settings(tmp_path):
    toml = manifest("ConfigMap", "redraft-learner")["data"]["learner.toml"]
    (tmp_path / "learner.toml").write_text(toml)
    in_kubernetes = load_config(tmp_path / "learner.toml")
    in_compose = load_config(DEPLOY / "compose" / "learner.toml")
    assert in_kubernetes.fleet.name == "http://vllm-pods:8000"
    assert in_compose.fleet.name == "http://vllm:8000"


def test_the_stream_is_full_before_the_broker_and_the_broker_before_its_disk(tmp_path):
    toml = tomllib.loads(manifest("ConfigMap", "redraft-learner")["data"]["learner.toml"])
    in_kubernetes = manifest("ConfigMap", "redraft-log")["data"]["nats.conf"]
    in_compose = (DEPLOY / "compose" / "nats.conf").read_text()
    assert toml["stream"]["max_bytes"] < _bytes(_most_stored(in_kubernetes)) < _bytes(_claim("redraft-log"))
    assert StreamLimits().max_bytes < _bytes(_most_stored(in_compose))


@pytest.mark.skipif(EXECUTABLE is None, reason="no nats-server here (Debian: apt-get install nats-server)")
@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_the_broker_reads_its_configuration(tmp_path, where):
    text = (DEPLOY / "compose" / "nats.conf").read_text()
    if where == "kubernetes":
        text = manifest("ConfigMap", "redraft-log")["data"]["nats.conf"]
    (tmp_path / "nats.conf").write_text(text.replace("/data", str(tmp_path / "data")))
    done = subprocess.run([EXECUTABLE, "-t", "-c", tmp_path / "nats.conf"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _most_stored(nats_conf):
    return re.search(r"max_file_store: (\w+)", nats_conf).group(1)


def _claim(name):
    (claim,) = manifest("StatefulSet", name)["spec"]["volumeClaimTemplates"]
    return claim["spec"]["resources"]["requests"]["storage"]


def _bytes(quantity):
    """Both Kubernetes and NATS: 1 GB of the latter is 1 Gi."""
    return int(re.fullmatch(r"(\d+)(Gi|GB)", quantity).group(1)) << 30


def test_the_plugin_reads_the_environment_of_the_deployment(tmp_path):
    environment = {entry["name"]: entry["value"] for entry in container("Deployment", "vllm")["env"]}
    (tmp_path / "token").write_text("secret")
    here = {"REDRAFT_REGISTRY": str(tmp_path), "REDRAFT_TOKEN_FILE": str(tmp_path / "token")}
    assert set(here) < set(environment)
    config = read_config(environment | here)
    assert is_enabled(environment)
    assert config.allow_remote
    assert config.capture is not None
    assert (config.capture.ingest, config.capture.nats.fleet) == ("nats://redraft-log:4222", "kubernetes")


def test_the_commands_of_the_files_are_ours():
    command = compose()["services"]["vllm"]["command"]
    assert command[0] == "serve"
    config = parse(serve.Config, serve.__doc__, {}, command[1:], prog="redraft")
    assert config.vllm_args == ("--host=0.0.0.0", "--port=8000", "--gpu-memory-utilization=0.6")
    assert (
        config.capture.nats.fleet == tomllib.loads((DEPLOY / "compose" / "learner.toml").read_text())["nats"]["fleet"]
    )

    probes = [container("StatefulSet", "redraft-log")["livenessProbe"]["exec"]["command"]]
    probes.append(compose()["services"]["log"]["healthcheck"]["test"].partition(" || ")[0].split())
    for redraft, name, *arguments in probes:
        assert (redraft, name) == ("redraft", "probe-log")
        assert parse(probe_log.Config, None, {}, arguments, prog="redraft").nats.fleet in ("compose", "kubernetes")


def test_no_service_puts_its_address_into_a_pods_environment():
    """That of one named vllm would be VLLM_PORT, which vLLM takes for a number."""
    for workload in [m for m in manifests() if m["kind"] in ("Deployment", "StatefulSet")]:
        assert workload["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_the_token_goes_into_no_image_package_or_commit():
    root = DEPLOY.parents[1]
    token = "recipes/deploy/compose/token"
    for name in (".dockerignore", ".gitignore"):
        assert token in (root / name).read_text().splitlines()
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["recipes"]
    shipped = {path for pattern in patterns for path in (root / "recipes").glob(pattern)}
    assert {path for path in DEPLOY.rglob("*") if path.is_file()} - {root / token} <= shipped
    assert not any(Path(token).match(f"recipes/{pattern}") for pattern in patterns)


def test_services_select_the_pods_that_the_settings_name():
    learner = tomllib.loads(manifest("ConfigMap", "redraft-learner")["data"]["learner.toml"])
    for url in (learner["ingest"], learner["fleet"]["name"]):
        name, port = re.fullmatch(r"\w+://([a-z-]+):(\d+)", url).groups()
        service = manifest("Service", name)["spec"]
        assert service["clusterIP"] == "None", "its name has to have every pod's address"
        assert [p["port"] for p in service["ports"]] == [int(port)]
        assert any(m["kind"] in ("Deployment", "StatefulSet") and selects(service, m) for m in manifests())
    assert manifest("StatefulSet", "redraft-learner")["spec"]["replicas"] == 1


def selects(service, workload):
    return service["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def test_every_claim_and_secret_that_is_mounted_is_declared_or_told_to_create():
    readme = (DEPLOY / "kubernetes" / "README.md").read_text()
    for workload in [m for m in manifests() if m["kind"] in ("Deployment", "StatefulSet")]:
        for volume in workload["spec"]["template"]["spec"]["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert manifest("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
            if "configMap" in volume:
                assert manifest("ConfigMap", volume["configMap"]["name"])
            if "secret" in volume:
                assert f"secret generic {volume['secret']['secretName']}" in readme
