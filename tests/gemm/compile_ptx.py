"""Compiles kernels to PTX as they are asked for: one JSON request a line of stdin, one JSON answer a line of stdout.

An answer is {"ptx": ..., "shared": bytes of shared memory}, or {"error": ...}.

Run by ptx_launch.py in a process without TRITON_INTERPRET, for a GPU that need not be there.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compile_ptx(request: dict[str, Any], capability: int) -> dict[str, Any]:
    """The answer to a request of ptx_launch.py."""
    kernel = getattr(importlib.import_module(request["module"]), request["kernel"])
    constants = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in request["constants"].items()
    }
    attributes = {(index,): [["tt.divisibility", 16]] for index in request["multiples_of_16"]}
    source = ASTSource(kernel, request["signature"], constants, attributes)
    options = {"num_warps": request["num_warps"], "enable_fp_fusion": False}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"ptx": done.asm["ptx"], "shared": done.metadata.shared}


def main(capability: int) -> None:
    for line in sys.stdin:
        try:
            answer = compile_ptx(json.loads(line), capability)
        except Exception:  # whatever it is, the test that asked should say it
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
