"""What the doctor looks at, shown while it does."""

from hvdtrain.tools.doctor.gather import Checking


def test_what_has_ended_is_no_longer_named():
    seen = []
    checking = Checking(seen.append)
    with checking("import of torch"), checking("mpirun"):
        pass
    assert seen == ["checking: import of torch", "checking: import of torch, mpirun", "checking: import of torch"]
