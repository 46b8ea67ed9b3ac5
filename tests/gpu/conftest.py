"""What needs a GPU: `python -m pytest tests/gpu` in an environment whose torch has CUDA."""

import pytest
import torch


def pytest_sessionstart() -> None:
    if not torch.cuda.is_available():
        pytest.exit(f"tests/gpu needs a GPU, and torch {torch.__version__} sees none", returncode=2)
