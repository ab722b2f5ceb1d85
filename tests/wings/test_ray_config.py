"""Ray's LLMConfig as settings and as deployment options, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray_helpers import CPUConfig, LLMConfig, ModelLoadingConfig

from specjax.engine import EngineConfig
from specjax.fleet.ray import deployment_name, deployment_options, settings_of


def test_settings():
    loading = ModelLoadingConfig("org/tiny.1", "folder", "tokens")
    settings = settings_of(LLMConfig(loading, {"max-running-requests": 3, "api_key": ["k"], "max_model_len": 99}))
    assert settings.model.model == "folder" and settings.model.tokenizer_path == "tokens"
    assert settings.server.served_model_name == "org/tiny.1" and settings.server.api_key == ("k",)
    assert settings.engine.max_running_requests == 3 and settings.engine.context_length == 99
    assert settings_of(LLMConfig()).model.model == "tiny", "an id without a source is the source"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine_kwargs": {"max_runing_requests": 3}}, "unknown key max_runing_requests; did you mean max-running"),
        ({"engine_kwargs": {"page_size": 0}}, "engine_kwargs: page_size must be"),
        ({"engine_kwargs": {"model_path": "x"}}, "model_path is model_source in model_loading_config"),
        ({"engine_kwargs": {"port": 1}}, "port has no effect under Ray Serve"),
        ({"engine_kwargs": {"max_model_len": 9, "context-length": 9}}, "context-length are the same setting"),
        ({"lora_config": object()}, "no LoRA adapters"),
        ({"model_loading_config": ModelLoadingConfig("a", "s3://bucket/a")}, "got 's3://bucket/a'"),
        ({"model_loading_config": ModelLoadingConfig("a", SimpleNamespace(bucket_uri="gs://b"))}, "got 'gs://b'"),
    ],
)
def test_what_cannot_be_served(changes, said):
    with pytest.raises(ValueError, match=said):
        settings_of(LLMConfig(**changes))


def test_a_replica_takes_a_gpu_for_each_device_unless_the_config_says_otherwise():
    def actor(**changes):
        options = deployment_options(LLMConfig(**changes))["ray_actor_options"]
        options.pop("runtime_env")
        return options

    gpu = CPUConfig("gpu")
    assert actor() == {"num_cpus": 1, "num_gpus": 0}
    assert actor(accelerator_config=gpu) == {"num_cpus": 1, "num_gpus": 1}
    assert actor(accelerator_config=gpu, engine_kwargs={"tp": 2}) == {"num_cpus": 1, "num_gpus": 2}
    bundle = {"CPU": 4, "GPU": 0.5, "memory": 7, "disk": 1}
    assert actor(accelerator_config=gpu, accelerator_type="H100", placement_group_config={"bundles": [bundle]}) == {
        "num_cpus": 4, "num_gpus": 0.5, "memory": 7, "resources": {"disk": 1}, "accelerator_type": "H100",
    }  # fmt: skip
    assert actor(placement_group_config={"bundle_per_worker": {"CPU": 2}})["num_cpus"] == 2
    assert actor(deployment_config={"ray_actor_options": {"num_cpus": 3}})["num_cpus"] == 3


def test_limits_and_autoscaling():
    """Ray's own default for a model is not to scale up at all."""
    engine = {"max_running_requests": 3, "max_queued_requests": 5}
    scaled = {"autoscaling_config": {"min_replicas": 0, "max_replicas": 4}}
    config = LLMConfig(engine_kwargs=engine, deployment_config=scaled, runtime_env={"env_vars": {"A": "1"}})
    options = deployment_options(config)
    assert options["max_ongoing_requests"] == 8
    assert options["autoscaling_config"] == {"min_replicas": 0, "max_replicas": 4, "target_ongoing_requests": 3}
    assert options["ray_actor_options"]["runtime_env"] == {"env_vars": {"A": "1"}}
    assert scaled == {"autoscaling_config": {"min_replicas": 0, "max_replicas": 4}}, "the config is not changed"
    auto = deployment_options(LLMConfig(deployment_config={"num_replicas": "auto"}))
    assert auto["autoscaling_config"] == {"target_ongoing_requests": EngineConfig.max_running_requests}
    own = {"max_ongoing_requests": 9, "autoscaling_config": {"target_ongoing_requests": 2}}
    assert deployment_options(LLMConfig(deployment_config=own)).items() >= own.items()
    assert "autoscaling_config" not in deployment_options(LLMConfig(deployment_config={"num_replicas": 2}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"accelerator_config": CPUConfig("tpu")}, "kind must be gpu or cpu, got 'tpu'"),
        ({"placement_group_config": {"bundles": [{"GPU": 1}] * 2}}, "takes one bundle, got 2; num_replicas"),
        ({"deployment_config": {"placement_group_bundles": [{}]}}, "write placement_group_config"),
    ],
)
def test_what_cannot_be_placed(changes, said):
    with pytest.raises(ValueError, match=said):
        deployment_options(LLMConfig(**changes))


def test_names():
    assert deployment_name(LLMConfig(ModelLoadingConfig("org/tiny.1"))) == "SpecjaxServer:org--tiny_1"
    assert deployment_name(LLMConfig(deployment_config={"name": "mine"})) == "SpecjaxServer:mine"
