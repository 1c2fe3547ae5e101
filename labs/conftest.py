"""`make test` executes every lab, at a small scale; the exercise's own tests are in tests/test_labs_exercise.py."""

import os

os.environ.setdefault("HVDTRAIN_LAB_SCALE", "0.1")
collect_ignore_glob = ["2-exercise-*"]
