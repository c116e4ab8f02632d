from tests.train.conftest import run_here

__all__ = ["run_here"]
