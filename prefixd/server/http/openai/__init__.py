"""The OpenAI front: translates OpenAI's API to `Generation`, as `services/inference_service.py` does for gRPC."""

from prefixd.server.http.openai.openai_routes import OpenAIRoutes

__all__ = ["OpenAIRoutes"]
