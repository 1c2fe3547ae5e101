# Everything goes into .venv, and Horovod's finished wheel into ~/.cache/hvdtrain; nothing else is touched.
PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
# The small build where there is one; none at all for a Python that TensorFlow is not made for yet.
TENSORFLOW := 'tensorflow-cpu; python_version < "3.14" and platform_machine == "x86_64"' \
	'tensorflow; python_version < "3.14" and platform_machine != "x86_64"'

.PHONY: train test check horovod clean

train: horovod  ## ResNet50 on real pictures over two Horovod ranks
	$(BIN)/horovodrun -np 2 $(BIN)/python -m hvdtrain.torch digits

test: horovod  ## every test
	$(BIN)/python -m pytest

check: .venv/installed  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

horovod: .venv/installed
	$(BIN)/python -m hvdtrain build

# A Python without ensurepip (Debian without python3-venv) still has a pip that can install into the environment.
.venv/installed: setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hvdtrain needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; say which: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv || { $(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torch,test]' $(TENSORFLOW)
	touch $@

clean:  ## forget the environment; the runs and Horovod's wheel stay
	rm -rf .venv
