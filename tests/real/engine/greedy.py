"""Greedy tokens from vLLM's own engine: greedy.py MODEL '{"tensor_parallel_size": 2, ...}'."""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        dtype="float32",
        **json.loads(sys.argv[2]),
    )
    prompts = [{"prompt_token_ids": list(range(1, 9))}, {"prompt_token_ids": [100, 200, 30]}]
    sampling = SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
    print(
        "TOKENS",
        json.dumps([list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling)]),
    )


if __name__ == "__main__":
    main()
