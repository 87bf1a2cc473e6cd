"""kvanta.ray.app: arguments, and the config files that name it, and one behind Ray's proxy."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from live_server import events

from kvanta import LLM, InputError, SamplingParams

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ray
from ray import serve
from ray.serve.schema import ServeDeploySchema
from server_process import free_port

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


def test_the_application_answers_behind_rays_proxy() -> None:
    port = free_port()
    ray.init("local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        arguments = {"model": "stories260k", "replicas": 1, "threads": 1, "kv_cache_memory_bytes": "8MiB"}
        arguments |= {"ray_actor_options": {"num_cpus": 0}, "served_model_name": ["tiny"], "kv_cache_dtype": "int8"}
        serve.run(kvanta.ray.app(arguments), name="kvanta", route_prefix="/")
        body = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 1, "temperature": 0.8}
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            answer = client.post("/v1/completions", json=body).json()
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                pieces = [json.loads(data)["choices"][0]["text"] for data in events(response) if data != "[DONE]"]
            models = [each["id"] for each in client.get("/v1/models").json()["data"]]
            assert client.post("/v1/completions", json={"prompt": []}).status_code == 400
    finally:
        serve.shutdown()
        ray.shutdown()
    llm = LLM("stories260k", kv_cache_dtype="int8", threads=1, kv_cache_memory_bytes="8MiB")
    params = SamplingParams(max_tokens=12, seed=1, temperature=0.8)
    wanted = llm.generate("Once upon a time", params)[0].outputs[0].text
    assert answer["choices"][0]["text"] == "".join(pieces) == wanted
    assert models == ["tiny"]
