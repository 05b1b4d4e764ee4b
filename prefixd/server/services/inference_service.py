"""`Inference` over gRPC; the contract is in `proto/prefixd/v1/inference.proto`, the work in
`prefixd/serving/generation/`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from prefixd.base.sampling import BeamSearch, Sampling
from prefixd.base.tenancy.tenants import Role
from prefixd.server.retention_messages import retention_requests
from prefixd.server.rpc.door import streaming, unary
from prefixd.server.rpc.receiving import current_call, current_caller
from prefixd.serving.generation import (
    Accepted,
    Finished,
    GenerateParams,
    Generation,
    GenerationEvent,
    SequenceFinished,
    Tokens,
)
from prefixd.v1 import inference_pb2 as pb
from prefixd.v1 import inference_pb2_grpc

_REASONS: dict[str, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Translates between gRPC and `Generation`.

    Args:
        generation: does the work.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @streaming
    async def Generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Runs a prompt and streams its tokens."""
        async with aclosing(self._generation.run(_params(request))) as events:
            async for event in events:
                yield _response(event)

    @unary
    async def Cancel(self, request: pb.CancelRequest) -> pb.CancelResponse:
        """Ends a request of the caller's tenant by its id; for an operator, of every tenant."""
        caller = current_caller()
        of = None if caller.role is Role.ADMIN else caller.tenant
        return pb.CancelResponse(cancelled=self._generation.cancel(request.request_id, of))


def _params(request: pb.GenerateRequest) -> GenerateParams:
    return GenerateParams(
        prompt=request.text if request.WhichOneof("prompt") == "text" else request.token_ids.ids,
        images=request.images,
        request_id=request.request_id,
        sampling=_sampling(request),
        n=request.n,
        best_of=request.best_of,
        priority=request.priority,
        deadline_s=request.deadline_s if request.HasField("deadline_s") else None,
        salt=request.salt,
        model=request.model,
        tenant=current_caller().tenant,
        read_only=request.read_only,
        message_bytes=current_call().message_bytes,
        waited_s=current_call().waited_s,
        retention=retention_requests(request.retention),
        client_id=current_call().headers.client_id,
        trace=current_call().headers.trace,
    )


def _sampling(request: pb.GenerateRequest) -> Sampling:
    sampling, search = request.sampling, request.beam_search
    return Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_token_ids=sampling.stop_token_ids,  # not copied: its length is checked first
        stop=sampling.stop,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        forced_tokens=sampling.forced_tokens.ids if sampling.HasField("forced_tokens") else None,
        beam_search=BeamSearch(
            width=search.width,
            length_penalty=search.length_penalty if search.HasField("length_penalty") else 1.0,
            early_stopping=search.early_stopping,
        )
        if request.HasField("beam_search")
        else None,
    )


def _response(event: GenerationEvent) -> pb.GenerateResponse:
    match event:
        case Accepted():
            return pb.GenerateResponse(
                accepted=pb.Accepted(
                    request_id=event.request_id,
                    prompt_tokens=event.prompt_tokens,
                    retention_refused=event.retention_refused,
                )
            )
        case Tokens():
            logprobs = [
                pb.TokenLogprobs(logprob=each.chosen, top_ids=each.token_ids, top_logprobs=each.logprobs)
                for each in event.logprobs
            ]
            tokens = pb.Tokens(token_ids=event.token_ids, text=event.text, index=event.index, logprobs=logprobs)
            return pb.GenerateResponse(tokens=tokens)
        case SequenceFinished():
            return pb.GenerateResponse(
                sequence_finished=pb.SequenceFinished(
                    index=event.index,
                    reason=_REASONS[event.reason],
                    output_tokens=event.output_tokens,
                    cumulative_logprob=event.cumulative_logprob,
                )
            )
        case Finished():
            gpu, cpu, disk, remote = event.hit_tokens
            return pb.GenerateResponse(
                finished=pb.Finished(
                    reason=_REASONS[event.reason],
                    prompt_tokens=event.prompt_tokens,
                    output_tokens=event.output_tokens,
                    hit_tokens=pb.HitTokens(gpu=gpu, cpu=cpu, disk=disk, remote=remote),
                    queue_s=event.queue_s,
                    ttft_s=event.ttft_s,
                    resumed=event.resumed,
                    encoded_images=event.encoded_images,
                    cumulative_logprob=event.cumulative_logprob,
                )
            )
