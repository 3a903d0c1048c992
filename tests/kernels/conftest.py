"""Without CUDA the kernels run in Triton's interpreter, which has to be chosen before their modules are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
