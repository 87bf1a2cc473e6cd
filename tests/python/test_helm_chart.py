"""The Helm chart in examples/helm, rendered by helm: the objects that values make, and values that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from release_checks import version_of

from kvanta.cli import serve
from kvanta.cli.arguments import given_options
from kvanta.server.options import OPTIONS, read_options

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "examples" / "helm" / "kvanta"
EXAMPLE = ROOT / "examples" / "kubernetes" / "deployment.yaml"


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "helm"
    assert program.exists(), "helm is missing: setup_helm of scripts/setup.sh installs it, scripts/test calls that"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def render(values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    settings = [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
    return helm("template", "mine", CHART, *settings)


def objects(**values: Any) -> dict[str, dict[str, Any]]:
    """The objects by their kind."""
    done = render(values)
    assert done.returncode == 0, done.stderr
    return {entry["kind"]: entry for entry in yaml.safe_load_all(done.stdout)}


def container(made: dict[str, dict[str, Any]], kind: str = "StatefulSet") -> dict[str, Any]:
    (found,) = made[kind]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_the_chart_is_clean_and_of_this_version() -> None:
    done = helm("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version_of(ROOT)


def test_default_objects() -> None:
    made = objects()
    assert set(made) == {"StatefulSet", "Service"}
    pod = made["StatefulSet"]["spec"]["template"]
    labels = made["StatefulSet"]["spec"]["selector"]["matchLabels"]
    assert labels == made["Service"]["spec"]["selector"]
    assert labels.items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    (claim,) = made["StatefulSet"]["spec"]["volumeClaimTemplates"]
    (mount,) = container(made)["volumeMounts"]
    assert claim["metadata"]["name"] == mount["name"]
    assert container(made)["image"] == f"kvanta:{version_of(ROOT)}"
    assert "env" not in container(made)


def test_the_server_takes_the_arguments() -> None:
    """The chart and the example without Helm give options of `kvanta serve`, and the same probes."""
    made = objects(model="org/name", shutdownSeconds=90, args=["--kv-cache-dtype=k=int8,v=int4"])
    words = container(made)["args"]
    values = serve.parser().parse_args(words)
    assert (values.MODEL, values.kv_cache_dtype) == ("org/name", "k=int8,v=int4")
    assert values.kv_cache_dir.startswith(container(made)["volumeMounts"][0]["mountPath"])
    options = read_options(given_options(values, OPTIONS))
    assert options.shutdown_timeout == 90
    assert made["StatefulSet"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 90
    assert not [word for word in container(objects(**{"storage.prefixes": ""}))["args"] if "kv-cache-dir" in word]

    example = {entry["kind"]: entry for entry in yaml.safe_load_all(EXAMPLE.read_text())}
    assert serve.parser().parse_args(container(example, "Deployment")["args"]).MODEL == "smollm2"
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        here, there = container(made)[name], container(example, "Deployment")[name]
        assert {key: here[key] for key in here if key != "failureThreshold"} == {
            key: there[key] for key in there if key != "failureThreshold"
        }


def test_a_key_comes_from_a_secret() -> None:
    (variable,) = container(objects(apiKeySecret="keys"))["env"]
    assert variable["name"] == "KVANTA_API_KEY"
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "api-key"}


def test_several_pods_have_a_disruption_budget_and_may_scale() -> None:
    made = objects(replicas=2)
    assert set(made) == {"StatefulSet", "Service", "PodDisruptionBudget"}
    assert made["StatefulSet"]["spec"]["replicas"] == 2
    scaled = objects(replicas=2, autoscaling={"enabled": True, "maxReplicas": 6})
    assert "replicas" not in scaled["StatefulSet"]["spec"], "it would undo what the autoscaler has set"
    scaler = scaled["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 6)
    assert scaler["scaleTargetRef"]["name"] == scaled["StatefulSet"]["metadata"]["name"]


def test_monitoring_and_network_policy() -> None:
    made = objects(**{"serviceMonitor.enabled": True, "networkPolicy.enabled": True})
    (port,) = made["Service"]["spec"]["ports"]
    (endpoint,) = made["ServiceMonitor"]["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    selected = made["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert selected.items() <= made["Service"]["metadata"]["labels"].items()
    (rule,) = made["NetworkPolicy"]["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {}}], "the namespace"
    assert rule["ports"] == [{"port": container(made)["ports"][0]["name"]}]
    peers = [{"namespaceSelector": {"matchLabels": {"name": "clients"}}}]
    (rule,) = objects(**{"networkPolicy.enabled": True, "networkPolicy.from": peers})["NetworkPolicy"]["spec"][
        "ingress"
    ]
    assert rule["from"] == peers


@pytest.mark.parametrize(
    "values",
    [{"replcas": 2}, {"replicas": 0}, {"storage.prefixes": "16 GB"}, {"model": ""}, {"args": "--kv-cache-dtype=int4"}],
    ids=str,
)
def test_values_that_are_refused(values: dict[str, Any]) -> None:
    done = render(values)
    assert done.returncode != 0
    assert next(iter(values)).split(".")[0] in done.stderr
