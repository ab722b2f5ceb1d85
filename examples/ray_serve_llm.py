"""ray.serve.llm with specjax as the server: `serve run examples.ray_serve_llm:app` from the repository's root.

ray.serve.llm takes its request types from vLLM or SGLang, one of which must be installed; its engine is not used.
`examples/ray_serve.yaml` needs neither.
"""

from specjax.serve.ray import build_openai_app

app = build_openai_app(
    {
        "llm_configs": [
            {
                "model_loading_config": {"model_id": "smollm2-135m-instruct"},
                "server_cls": "specjax.serve.ray:SpecjaxServer",
                "accelerator_config": {"kind": "cpu"},  # without it: one GPU a replica
                "engine_kwargs": {"max_running_requests": 8},
                "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
            }
        ]
    }
)
