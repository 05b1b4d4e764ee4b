"""Generates with transformers' own model code on vAttention's KV cache, without prefixd's daemon."""
# Prompts are prefilled one by one, then all decode together. Each request is a row of contiguous addresses; the memory
# for the next iteration is mapped in the background while the model computes this one (docs/design/virtual_memory.md).

import argparse

import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from transformers import AttentionInterface, AutoModelForCausalLM, Cache, LlamaConfig

from prefixd_swap import VAttention


class RowCache(Cache):
    """Writes new keys and values to the rows of their requests; row rows[i] had starts[i] tokens before the pass."""

    def update(self, key, value, layer_idx, *args, **kwargs):
        for row, start, *new in zip(self.rows, self.starts, key, value, strict=True):
            for tensor, states in zip(self.tensors[layer_idx], new, strict=True):
                tensor[row, start : start + states.shape[1]] = states.transpose(0, 1)
        return key, value


def attend(module, query, key, value, mask, scaling=None, cache=None, **kwargs):
    """Reads rows as slices: contiguous memory is what ordinary attention expects. A prompt starts at token 0."""
    outputs, new = [], query.shape[2]
    for row, start, queries in zip(cache.rows, cache.starts, query, strict=True):
        keys, values = (tensor[row, : start + new].transpose(0, 1)[None] for tensor in cache.tensors[module.layer_idx])
        outputs.append(attention(queries[None], keys, values, is_causal=new > 1, scale=scaling, enable_gqa=True))
    return torch.cat(outputs).transpose(1, 2), None


@torch.inference_mode()
def generate(model, prompts, new_tokens, kv, tensors):
    """The greedy tokens of every prompt; `tensors` are what init_kvcache returned."""
    cache, texts, lengths = RowCache(layers=[]), {}, torch.zeros(len(tensors[0][0]), dtype=torch.long)
    cache.tensors = tensors

    def forward(rows, tokens):
        cache.rows, cache.starts = rows, lengths[rows]
        lengths[rows] += len(tokens[0])
        if kv.step(lengths.tolist()) < 0:
            raise SystemExit("out of memory: an engine would preempt a request here, and step again")
        positions = cache.starts[:, None] + torch.arange(len(tokens[0]))
        logits = model(torch.tensor(tokens), position_ids=positions, past_key_values=cache, cache=cache).logits
        for row, token in zip(rows, logits[:, -1].argmax(-1).tolist(), strict=True):
            texts.setdefault(row, []).append(token)

    for prompt in prompts:
        forward([kv.alloc_reqid()], [prompt])
    for _ in range(new_tokens - 1):
        forward(list(texts), [text[-1:] for text in texts.values()])
    for row in texts:
        kv.free_reqid(row)
    return list(texts.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=40, metavar="N")
    count = parser.parse_args().new_tokens
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, hidden_size=128, **shape)).eval()
    prompts = [torch.randint(512, (length,)).tolist() for length in (5, 70, 23)]
    expected = [model.generate(torch.tensor([p]), max_new_tokens=count)[0, len(p) :].tolist() for p in prompts]
    AttentionInterface.register("vattention", attend)
    model.set_attn_implementation("vattention")
    with VAttention() as kv:
        sizes = {"layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": torch.float32, "device": "cpu"}
        tensors = kv.init_kvcache(**sizes, max_batch=3, max_context=2048, memory_limit=4 << 20, chunk_bytes=16 << 10)
        texts = generate(model, prompts, count, kv, tensors)
        print(*texts, *kv.rounding, kv.stats(), f"same tokens as model.generate: {texts == expected}", sep="\n")
    raise SystemExit(texts != expected)
