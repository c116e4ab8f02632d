from tests.infer.conftest import forked_engines

__all__ = ["forked_engines"]
