"""kvanta.ray.app: arguments, and the config files that name it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvanta import InputError

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

from ray.serve.schema import ServeDeploySchema

import kvanta.ray

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kuberay" / "rayservice.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "model is missing"),
        ({"model": "m", "port": 8000}, "port is an option of Ray's proxy"),
        ({"model": "m", "replicas": 0}, "replicas must be a positive integer or auto, got 0"),
        ({"model": "m", "replicas": "auto"}, "autoscaling_config need each other"),
        (
            {"model": "m", "replicas": 2, "autoscaling_config": {"max_replicas": 3}},
            "autoscaling_config need each other",
        ),
        ({"model": "m", "kv_cache_dtyp": "int4"}, "kv_cache_dtyp"),
        ({"model": "m", "tensor_parallel_size": 2}, "tensor_parallel_size = 2: not supported with replicas"),
        ({"model": "m", "max_num_seqs": "many"}, "max_num_seqs"),
        ({"model": "m", "max_body_bytes": "x"}, "max_body_bytes"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kvanta.ray.app(**arguments)


def test_the_kuberay_example_is_what_ray_serve_and_kvanta_read() -> None:
    service = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    (workers,) = cluster["workerGroupSpecs"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = config.applications
    module, _, name = application.import_path.partition(":")
    assert (module, name) == ("kvanta.ray", "app")
    built = kvanta.ray.app(application.args)
    assert application.args["autoscaling_config"]["max_replicas"] == workers["maxReplicas"]
    assert built._bound_deployment.name == "Front"
