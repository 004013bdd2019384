"""The files to deploy with: each by its own schema, and what they say by the code that reads it."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose
from parse_flags import parse

from redraft.engine.settings import read_settings, write_settings
from redraft.heads.catalog import find_family
from redraft.online.daemon.config import load_config
from redraft.online.engine.config import is_enabled, read_config
from redraft.online.records.nats_config import StreamLimits
from redraft.recipes.operate import probe_log
from redraft.recipes.serve import serve

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
    """As compose reads it: variables replaced by their defaults, anchors merged."""
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    return yaml.safe_load(
        re.sub(r"\$\{\w+_DIGEST:-\}", "", re.sub(r"\$\{MODELS[^}]*\}", "/models", text))
    )


def settings_of_the_learner(where: str, mounted: Path) -> str:
    """The learner's TOML file, with files of its secrets that exist: made in `mounted`."""
    text = (DEPLOY / "compose" / "learner.toml").read_text()
    if where == "kubernetes":
        text = manifest("ConfigMap", "redraft-learner")["data"]["learner.toml"]
    for path in re.findall(r'^(?:credentials|ca) = "(.*)"', text, re.MULTILINE):
        text = text.replace(path, str(make_file(mounted, path)))
    return text


def make_file(mounted: Path, path: str) -> Path:
    file = mounted / Path(path).name
    file.write_text("a key or a certificate")
    file.chmod(0o440)  # as mounted
    return file


@pytest.mark.parametrize(
    "manifest", manifests(), ids=lambda m: f"{m['kind']}-{m['metadata']['name']}"
)
def test_every_manifest_is_one_of_kubernetes(manifest):
    kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_a_manifest_with_a_mistake_is_found():
    broken = manifest("Deployment", "vllm")
    broken["spec"]["template"]["spec"]["containers"][0]["imagee"] = "redraft"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES_VERSION, strict=True)


def test_the_compose_file_is_one():
    text = yaml.safe_dump(compose())
    assert set(PyCompose.from_yaml(text).service_names()) == {
        "vllm",
        "learner",
        "log",
        "prometheus",
        "grafana",
    }
    with pytest.raises(ValueError, match="restrat"):
        PyCompose.from_yaml(text.replace("restart: unless-stopped", "restrat: unless-stopped"))


def test_every_file_that_compose_mounts_is_there():
    for service in compose()["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).resolve().is_file(), source


@pytest.mark.parametrize(("where", "server"), [("kubernetes", "vllm-pods"), ("compose", "vllm")])
def test_the_learner_of_either_reads_its_settings(where, server, tmp_path):
    file = tmp_path / "learner.toml"
    file.write_text(settings_of_the_learner(where, tmp_path))
    config = load_config(file)
    assert config.fleet.name == f"http://{server}:8000"
    assert config.ingest.startswith("tls://")
    assert config.nats.credentials is not None
    assert config.nats.ca is not None


def test_a_learner_that_shares_the_servers_gpu_pauses_for_their_requests(tmp_path):
    services = compose()["services"]
    assert services["vllm"]["deploy"] == services["learner"]["deploy"]
    # While vLLM starts, it takes all new use of the GPU's memory for its own.
    assert services["learner"]["depends_on"] == {"vllm": {"condition": "service_healthy"}}
    assert "depends_on" not in services["vllm"]
    assert ":8000/health" in services["vllm"]["healthcheck"]["test"][-1]
    for where, shares in (("compose", True), ("kubernetes", False)):
        (file := tmp_path / "learner.toml").write_text(settings_of_the_learner(where, tmp_path))
        config = load_config(file)
        assert (config.fleet.shares_device, config.training.accumulation > 1) == (shares, shares)


def test_the_stream_is_full_before_the_broker_and_the_broker_before_its_disk(tmp_path):
    toml = tomllib.loads(manifest("ConfigMap", "redraft-learner")["data"]["learner.toml"])
    in_kubernetes = manifest("ConfigMap", "redraft-log")["data"]["nats.conf"]
    in_compose = (DEPLOY / "compose" / "nats.conf").read_text()
    assert (
        toml["stream"]["max_bytes"]
        < _bytes(_most_stored(in_kubernetes))
        < _bytes(_claim("redraft-log"))
    )
    assert StreamLimits().max_bytes < _bytes(_most_stored(in_compose))


def test_both_brokers_have_the_same_doors():
    in_kubernetes = manifest("ConfigMap", "redraft-log")["data"]["nats.conf"]
    assert in_kubernetes.replace("44GB", "12GB") == (DEPLOY / "compose" / "nats.conf").read_text()


def _most_stored(nats_conf):
    return re.search(r"max_file_store: (\w+)", nats_conf).group(1)


def _claim(name):
    (claim,) = manifest("StatefulSet", name)["spec"]["volumeClaimTemplates"]
    return claim["spec"]["resources"]["requests"]["storage"]


def _bytes(quantity):
    """Both Kubernetes and NATS: 1 GB of the latter is 1 Gi."""
    return int(re.fullmatch(r"(\d+)(Gi|GB)", quantity).group(1)) << 30


def test_the_plugin_reads_the_environment_of_the_deployment(tmp_path):
    environment = {
        entry["name"]: entry["value"] for entry in container("Deployment", "vllm")["env"]
    }
    (tmp_path / "token").write_text("a-secret-for-tests")
    (tmp_path / "token").chmod(0o600)
    written = read_settings(environment)["capture"]["nats"]
    files = {name: str(make_file(tmp_path, written[name])) for name in ("credentials", "ca")}
    here = {
        "registry": str(tmp_path),
        "token_file": str(tmp_path / "token"),
        "capture": {"nats": files},
    }
    assert set(here) < set(read_settings(environment))
    config = read_config(environment | write_settings(read_settings(environment), here))
    assert is_enabled(environment)
    assert config.allow_remote
    assert config.capture.is_on
    assert (config.capture.ingest, config.capture.nats.fleet) == (
        "tls://redraft-log:4222",
        "kubernetes",
    )


def test_the_commands_of_the_files_are_ours(tmp_path):
    def mounted(arguments):
        """With files that exist."""
        files = [
            re.fullmatch(r"(--\S+=)?(/etc/nats/\S+|/run/secrets/log-\S+)", text)
            for text in arguments
        ]
        return [
            text if file is None else f"{file[1] or ''}{make_file(tmp_path, file[2])}"
            for text, file in zip(arguments, files, strict=True)
        ]

    command = mounted(compose()["services"]["vllm"]["command"])
    assert command[0] == "serve"
    config = parse(serve.ServeConfig, serve.__doc__, {}, command[1:], prog="redraft")
    memory, load = "--gpu-memory-utilization=0.6", "--enable-server-load-tracking"
    assert config.vllm_args == ("--host=0.0.0.0", "--port=8000", memory, load)
    assert (
        config.capture.nats.fleet
        == tomllib.loads((DEPLOY / "compose" / "learner.toml").read_text())["nats"]["fleet"]
    )

    probes = [container("StatefulSet", "redraft-log")["livenessProbe"]["exec"]["command"]]
    probes.append(compose()["services"]["log"]["healthcheck"]["test"].partition(" || ")[0].split())
    for redraft, name, part, *arguments in probes:
        assert (redraft, name, part) == ("redraft", "fleet", "probe")
        assert _can_open(parse(probe_log.ProbeConfig, None, {}, mounted(arguments), prog="redraft"))
        assert arguments[0] == "tls://127.0.0.1:4222"
    assert _can_open(config.capture)


def _can_open(config):
    return None not in (config.nats.credentials, config.nats.ca) and config.nats.fleet in (
        "compose",
        "kubernetes",
    )


def test_one_slow_answer_does_not_kill_the_log_of_compose_but_a_second_one_does(tmp_path):
    said, killed = tmp_path / "said", tmp_path / "killed"
    for name, does in (("redraft", f"exit $(cat {said})"), ("pkill", f"echo $@ >> {killed}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)

    def check(port: int) -> int:
        test = compose()["services"]["log"]["healthcheck"]["test"]
        test = test.replace("4222'", f"{port}'").replace("/tmp/", f"{tmp_path}/")
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(["sh", "-c", test], env=path, capture_output=True).returncode

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        for answers, deaths in ((("1", "0", "1"), 0), (("1", "1"), 1)):
            killed.unlink(missing_ok=True)
            (tmp_path / "silent").unlink(missing_ok=True)  # as in a new container
            for answer in answers:
                said.write_text(answer)
                assert check(port) == int(answer)
            assert killed.exists() == bool(deaths), answers
    (tmp_path / "silent").unlink()
    killed.unlink()
    assert [check(port), check(port), killed.exists()] == [1, 1, False], "it reads its store"


def test_no_service_puts_its_address_into_a_pods_environment():
    """That of one named vllm would be VLLM_PORT, which vLLM takes for a number."""
    for workload in [m for m in manifests() if m["kind"] in ("Deployment", "StatefulSet")]:
        assert workload["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_no_secret_goes_into_an_image_package_or_commit():
    root = DEPLOY.parents[1]
    secrets = [
        f"recipes/deploy/{where}/{name}"
        for where in ("compose", "kubernetes")
        for name in ("token", "keys")
    ]
    for name in (".dockerignore", ".gitignore"):
        lines = (root / name).read_text().splitlines()
        for secret in secrets:
            assert any(fnmatch.fnmatch(secret, line.rstrip("/")) for line in lines), (name, secret)
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["redraft.recipes"]
    shipped = {path for pattern in patterns for path in (root / "recipes").glob(pattern)}
    here = {path for path in DEPLOY.rglob("*") if path.is_file()}
    hidden = {path for path in here for secret in secrets if path.is_relative_to(root / secret)}
    assert here - hidden <= shipped
    for secret in secrets:
        assert not any(Path(secret).match(f"recipes/{pattern}") for pattern in patterns)


def test_the_image_is_built_from_every_folder_that_is_installed():
    root = DEPLOY.parents[1]
    copied = {
        line[1:]
        for line in (root / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert {
        "pyproject.toml",
        "redraft",
        *(link.name for link in (root / "redraft").iterdir() if link.is_symlink()),
    } <= copied


def test_services_select_the_pods_that_the_settings_name():
    learner = tomllib.loads(manifest("ConfigMap", "redraft-learner")["data"]["learner.toml"])
    for url in (learner["ingest"], learner["fleet"]["name"]):
        name, port = re.fullmatch(r"\w+://([a-z-]+):(\d+)", url).groups()
        service = manifest("Service", name)["spec"]
        assert service["clusterIP"] == "None", "its name has to have every pod's address"
        assert [p["port"] for p in service["ports"]] == [int(port)]
        assert any(
            m["kind"] in ("Deployment", "StatefulSet") and selects(service, m) for m in manifests()
        )
    assert manifest("StatefulSet", "redraft-learner")["spec"]["replicas"] == 1


def selects(service, workload):
    return service["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()


def test_every_claim_and_secret_that_is_mounted_is_declared_or_told_to_create():
    readme = (DEPLOY / "kubernetes" / "README.md").read_text()
    for workload in [m for m in manifests() if m["kind"] in ("Deployment", "StatefulSet")]:
        for volume in workload["spec"]["template"]["spec"]["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert manifest(
                    "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
                )
            sources = volume["projected"]["sources"] if "projected" in volume else [volume]
            for source in sources:
                if "configMap" in source:
                    assert manifest("ConfigMap", source["configMap"]["name"])
                if "secret" in source:
                    name = source["secret"].get("secretName") or source["secret"]["name"]
                    assert f"secret generic {name}" in readme


def test_a_rollout_needs_no_spare_gpu_and_outlives_a_slow_load_and_a_dead_engine_ends():
    deployment, server = manifest("Deployment", "vllm")["spec"], container("Deployment", "vllm")
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    startup = server["startupProbe"]
    allowed_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert deployment["progressDeadlineSeconds"] > allowed_s
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[name]["httpGet"] == {"path": "/health", "port": "http"}
        if name != "startupProbe":  # while it loads, nothing is busy
            assert server[name]["timeoutSeconds"] >= 10
    for workload in workloads():
        assert "livenessProbe" in workload["spec"]["template"]["spec"]["containers"][0]
    (quiet,) = (arg for arg in server["args"] if arg.startswith("--disable-access-log"))
    assert {"/health", "/metrics", "/redraft/status"} <= set(quiet.partition("=")[2].split(","))
    for name, service in compose()["services"].items():
        assert "max-size" in service["logging"]["options"], name


def test_vllm_waits_for_a_slow_load_as_long_as_the_startup_probe_does():
    server = container("Deployment", "vllm")
    environment = {entry["name"]: entry["value"] for entry in server["env"]}
    startup = server["startupProbe"]
    allowed_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert int(environment["VLLM_ENGINE_READY_TIMEOUT_S"]) >= allowed_s


def test_20_servers_of_the_manifests_fit_their_learner_by_the_table_of_capacity(tmp_path):
    environment = {one["name"]: one["value"] for one in container("Deployment", "vllm")["env"]}
    (file := tmp_path / "learner.toml").write_text(settings_of_the_learner("kubernetes", tmp_path))
    settings, server = load_config(file), container("Deployment", "vllm")
    (speculative,) = (
        json.loads(arg.partition("=")[2])
        for arg in server["args"]
        if arg.startswith("--speculative-config=")
    )
    family = find_family(settings.draft.family)
    assert (family.method, str(settings.draft.initial)) == (
        speculative["method"],
        speculative["model"],
    )
    capture = read_settings(environment)["capture"]
    assert capture["hidden_states"] == family.is_head
    page = (DEPLOY.parents[1] / "docs" / "capacity.md").read_text()
    table = page.partition("<!-- table thousand -->")[2].partition("<!-- end -->")[0]
    (row,) = (line for line in table.splitlines() if line.startswith("| EAGLE-3 |"))
    rate, per_day, _, _, gpus = (cell.strip() for cell in row.split("|")[2:7])
    thousands = 20 * 2 * capture["fraction"]
    shown = page.partition("## 20 servers on Kubernetes")[2].partition("\n## ")[0]
    used = float(gpus) * thousands
    assert used < float(
        container("StatefulSet", "redraft-learner")["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert f"{used:.2f} of an H100" in shown
    assert f"{float(rate.split()[0]) * thousands:.0f} MB/s" in shown
    stored_per_s = float(per_day.removesuffix(" TB")) * 1e12 / 86400 * thousands
    assert settings.buffer.max_bytes / stored_per_s > 1800, "half an hour"
    assert settings.buffer.max_bytes < _bytes(_claim("redraft-learner")) / 1.5


# -------------------------------------------------------------------------------------------------------------
# doors


def workloads() -> list[dict[str, Any]]:
    return [m for m in manifests() if m["kind"] in ("Deployment", "StatefulSet")]


@pytest.mark.parametrize("workload", workloads(), ids=lambda m: m["metadata"]["name"])
def test_no_pod_has_more_rights_than_it_needs(workload):
    pod = workload["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in pod["containers"]:
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= each["resources"]["limits"].keys()
        assert {"cpu", "memory"} <= each["resources"]["requests"].keys()
        places = {mount["mountPath"] for mount in each["volumeMounts"]}
        assert "/tmp" in places, "nothing can be written elsewhere"
    for volume in pod["volumes"]:
        for source in (volume.get("secret"), volume.get("projected")):
            assert source is None or source["defaultMode"] == 0o440, "others could read it"


def test_a_policy_of_the_network_selects_every_pod_and_lets_none_at_the_log_but_two():
    policies = [m["spec"] for m in manifests() if m["kind"] == "NetworkPolicy"]
    for workload in workloads():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        (policy,) = [
            p for p in policies if p["podSelector"]["matchLabels"].items() <= labels.items()
        ]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert all(rule["from"] for rule in policy["ingress"]), "an empty list lets everyone in"
        assert all(
            "to" in rule or {port["port"] for port in rule["ports"]} == {53}
            for rule in policy["egress"]
        )
    (rule,) = manifest("NetworkPolicy", "redraft-log")["spec"]["ingress"]
    assert [source["podSelector"]["matchLabels"]["app"] for source in rule["from"]] == [
        "vllm",
        "redraft-learner",
    ]


def test_a_pod_has_the_time_to_end_its_answers_and_ship_its_records():
    pod = manifest("Deployment", "vllm")["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    (timeout_s,) = (
        int(arg.split("=")[1]) for arg in server["args"] if arg.startswith("--shutdown-timeout")
    )
    _, pause_s = server["lifecycle"]["preStop"]["exec"]["command"]
    assert timeout_s == serve.SHUTDOWN_TIMEOUT_S
    assert int(pause_s) + timeout_s + 20 <= pod["terminationGracePeriodSeconds"]


def test_a_drain_takes_one_server_at_a_time():
    budget = manifest("PodDisruptionBudget", "vllm")["spec"]
    assert budget["maxUnavailable"] == 1
    assert selects({"selector": budget["selector"]["matchLabels"]}, manifest("Deployment", "vllm"))


def test_images_are_named_by_digest_and_the_readme_puts_them_in():
    (line,) = re.findall(
        r'sed -i "(s\|.*\|)" \*\.yaml', (DEPLOY / "kubernetes" / "README.md").read_text()
    )
    _, pattern, _, _ = line.split("|")
    for workload in workloads():
        for each in workload["spec"]["template"]["spec"]["containers"]:
            name = re.fullmatch(
                r"registry\.example/([a-z-]+)@sha256:[0-9a-f]{64}", each["image"]
            ).group(1)
            assert re.fullmatch(pattern.replace("$image", name), each["image"])


def test_every_base_of_the_images_has_a_slot_for_its_digest():
    docker = (DEPLOY / "Dockerfile").read_text()
    images = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)", docker, re.MULTILINE))
    bases = [
        re.sub(r"\$\{(\w+_IMAGE)\}", lambda slot: images[slot.group(1)], base)
        for base in re.findall(r"^FROM (\S+)", docker, re.MULTILINE)
    ]
    assert len(bases) == 3
    slots = set()
    for base in bases:
        slots.add(re.fullmatch(r"[\w./-]+:[\w.-]+\$\{(\w+_DIGEST)\}", base).group(1))
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    for slot in slots:
        assert f"ARG {slot}=\n" in docker
        assert f'{slot}: "${{{slot}:-}}"' in text
    for image in ("prom/prometheus", "grafana/grafana"):
        slot = f"{image.rpartition('/')[2].upper()}_DIGEST"
        assert re.search(rf"image: {image}:v?[\d.]+\$\{{{slot}:-\}}\n", text)
        slots.add(slot)
    assert all(slot in text.partition("\nname:")[0] for slot in slots), "told at the top"


def test_no_image_runs_as_root():
    for stage in (DEPLOY / "Dockerfile").read_text().split("\nFROM ")[2:]:
        users = re.findall(r"^USER (\S+)", stage, re.MULTILINE)
        assert users == ["1000:1000"]
        assert stage.index("\nUSER") > stage.rindex("\nRUN")


def test_compose_publishes_on_this_machine_only_and_grants_nothing():
    services = compose()["services"]
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"]
        assert "ipc" not in service
        assert "privileged" not in service
    on_the_log = {
        name for name, service in services.items() if "log" in service.get("networks", [])
    }
    assert on_the_log == {"vllm", "learner", "log"}
    assert services["log"]["networks"] == ["log"]
    assert compose()["networks"]["log"] == {"internal": True}
    given = {name: service.get("secrets", []) for name, service in services.items()}
    assert "log-learner" not in given["vllm"]
    assert "log-servers" not in given["learner"]
