import pytest


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    """A place for checkpoints that does not exist yet."""
    if request.param == "local":
        return str(tmp_path / "deep" / "checkpoints")
    return f"memory://{tmp_path}/deep/checkpoints"
