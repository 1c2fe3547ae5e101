"""Edits to horovodrun and its servers: new MPI launchers, root, exit codes, and CVE-2024-10190."""

from hvdtrain.build.table import Edit

_MPI_RUN = "horovod/runner/mpi_run.py"
_SINGLE_DASH = "Open MPI 5 takes an option with a single dash for the program to start; 4 knows both forms"


def controller_edits(mpi: bool) -> tuple[Edit, ...]:
    """Edits that tell horovodrun which controllers this very wheel is built with."""
    return tuple(
        Edit(
            f"horovodrun knows of {name}",
            "horovod/common/util.py",
            f"""\
        built_fn = lambda ext: ext.{name.lower()}_built()
        result = _check_extension_lambda(
            ext_base_name, built_fn, 'built with {name}', verbose)
""",
            f"        result = {built}\n",
            "it imports a whole framework to find out, at every start: seconds, and TensorFlow's banner (the loop "
            "around it now ends in its first turn)",
        )
        for name, built in (("MPI", mpi), ("Gloo", True))
    )


LAUNCHER = (
    Edit(
        "Open MPI options",
        _MPI_RUN,
        "['-mca pml ob1', '-mca btl ^openib']",
        "['--mca pml ob1', '--mca btl ^openib']",
        _SINGLE_DASH,
    ),
    Edit(
        "Open MPI binding",
        _MPI_RUN,
        "['-bind-to none', '-map-by slot']",
        "['--bind-to none', '--map-by slot']",
        _SINGLE_DASH + "; MPICH's Hydra does too",
    ),
    Edit(
        "Open MPI over ssh",
        _MPI_RUN,
        """else f'-mca plm_rsh_args""",
        """else f'--mca plm_rsh_args""",
        _SINGLE_DASH,
    ),
    Edit(
        "Open MPI interfaces",
        _MPI_RUN,
        "'-mca btl_tcp_if_include {nics}'",
        "'--mca btl_tcp_if_include {nics}'",
        _SINGLE_DASH,
    ),
    Edit(
        "Open MPI on many hosts",
        _MPI_RUN,
        "mpi_impl_flags.append('-mca ",
        "mpi_impl_flags.append('--mca ",
        _SINGLE_DASH,
        count=2,
    ),
    Edit(
        "Open MPI yields",
        _MPI_RUN,
        "    # if user does not specify any hosts, mpirun by default uses local host.\n",
        """\
    # A rank is two busy threads, its own and Horovod's: without yielding they starve each other.
    if mpi == _OMPI_IMPL and 2 * settings.num_proc > len(host_names or [None]) * (os.cpu_count() or 1):
        mpi_impl_flags.append('--mca mpi_yield_when_idle 1')

    # if user does not specify any hosts, mpirun by default uses local host.
""",
        "hosts are given with as many slots as ranks, so Open MPI does not see that cores are oversubscribed and "
        "spins: 4 ranks on 2 cores took 25 ms for a small allreduce, 1.3 ms with it",
    ),
    Edit(
        "MPICH is recognised",
        _MPI_RUN,
        "        elif 'MPICH' in output:\n",
        "        elif 'MPICH' in output or 'HYDRA' in output:\n",
        "MPICH's mpirun prints HYDRA, and MPICH only where its compiler flags happen to say it",
        "horovod PR 3984",
    ),
    Edit(
        "horovodrun by its path",
        "horovod/runner/launch.py",
        """\
def run_commandline():
    args = parse_args()
""",
        """\
def _prefer_own_environment():
    # Called by its path, horovodrun would start whatever mpirun and python the PATH has.
    own = os.path.dirname(sys.executable)
    path = os.environ.get('PATH', os.defpath).split(os.pathsep)
    if own not in path:
        os.environ['PATH'] = os.pathsep.join([own] + path)


def run_commandline():
    _prefer_own_environment()
    args = parse_args()
""",
        "the mpirun and the python of a virtual environment that is not activated are found",
    ),
    Edit(
        "one line when a rank fails",
        "horovod/runner/launch.py",
        "    _run(args)\n\n\nif __name__",
        """\
    try:
        _run(args)
    except (RuntimeError, ValueError) as error:
        print('horovodrun: ' + ' '.join(str(error).split()), file=sys.stderr)
        sys.exit(getattr(error, 'exit_code', 1))


if __name__""",
        "a rank's own message is not buried under a traceback of horovodrun",
    ),
    Edit(
        "the rank's exit code over Gloo",
        "horovod/runner/gloo_run.py",
        """\
            raise RuntimeError('Horovod detected that one or more processes exited with non-zero '
                               'status, thus causing the job to be terminated. The first process '
                               'to do so was:\\nProcess name: {name}\\nExit code: {code}\\n'
                               .format(name=name, code=exit_code))


def _get_min""",
        """\
            error = RuntimeError('rank {name} ended first, with exit code {code}; the job was stopped.'
                                 .format(name=name, code=exit_code))
            error.exit_code = exit_code if 0 < exit_code < 256 else 1
            raise error


def _get_min""",
        "horovodrun --gloo ends with the exit code of the rank that failed, as mpirun does",
    ),
    Edit(
        "one scope is forgotten, not all",
        "horovod/runner/http/http_server.py",
        "                        self.server.finished_list.clear()\n",
        "                        self.server.finished_list.pop(scope, None)\n",
        "a second hvd.init() over Gloo hangs or crashes when another scope's record of finished ranks is lost",
    ),
)

_CVE = "CVE-2024-10190: the elastic rendezvous server unpickled what anyone sent it"

ELASTIC = (
    Edit(
        "unpickle plain data only",
        "horovod/runner/common/util/codec.py",
        "import base64\nimport pickle\nimport cloudpickle\n",
        """\
import base64
import io
import pickle
import cloudpickle


class _NamedClassesUnpickler(pickle.Unpickler):
    def __init__(self, data, classes):
        super().__init__(io.BytesIO(data))
        self._classes = {(c.__module__, c.__qualname__): c for c in classes}

    def find_class(self, module, name):
        if (module, name) not in self._classes:
            raise pickle.UnpicklingError('{}.{} is not accepted here'.format(module, name))
        return self._classes[module, name]


def loads_only(data, classes=()):
    \"\"\"The object in data, made of plain values and the given classes. Raises ValueError for anything else.\"\"\"
    try:
        return _NamedClassesUnpickler(data, classes).load()
    except Exception as error:
        raise ValueError('refused: {}'.format(error)) from None
""",
        _CVE,
        _CVE[:14],
    ),
    Edit(
        "worker addresses are plain data",
        "horovod/runner/elastic/rendezvous.py",
        "                addresses, secret_key = codec.loads_base64(value)\n",
        """\
                addresses, secret_key = codec.loads_only(base64.b64decode(value))
                if not isinstance(addresses, dict) or not isinstance(secret_key, bytes):
                    raise ValueError('worker addresses are a dict, and a key of bytes')
""",
        _CVE,
        _CVE[:14],
    ),
    Edit(
        "base64 for worker addresses",
        "horovod/runner/elastic/rendezvous.py",
        "import logging\n",
        "import base64\nimport logging\n",
        _CVE,
        _CVE[:14],
    ),
    Edit(
        "a refused PUT is answered",
        "horovod/runner/http/http_server.py",
        "        self._put_value(scope, key, value)\n        self.send_status_code(OK)\n",
        """\
        try:
            self._put_value(scope, key, value)
        except Exception as error:
            logging.error('KVStore ERROR: PUT {path}: {error}'.format(path=self.path, error=error))
            self.send_status_code(BAD_REQUEST)
            return

        self.send_status_code(OK)
""",
        _CVE + "; a request that is not understood now gets 400",
        _CVE[:14],
    ),
    Edit(
        "a client chooses what it unpickles",
        "horovod/runner/common/util/network.py",
        "        return cloudpickle.loads(message)\n",
        "        return self.loads(message)\n",
        _CVE + "; whoever registers an address also chooses the key that signs the reply from there",
        _CVE[:14],
    ),
    Edit(
        "by default cloudpickle",
        "horovod/runner/common/util/network.py",
        "    def __init__(self, key):\n        self._key = key\n",
        "    loads = staticmethod(cloudpickle.loads)\n\n    def __init__(self, key):\n        self._key = key\n",
        _CVE,
        _CVE[:14],
    ),
    Edit(
        "a client chooses its wire",
        "horovod/runner/common/util/network.py",
        "        self._wire = Wire(key)\n        self._match_intf",
        "        self._wire = self.wire(key)\n        self._match_intf",
        _CVE,
        _CVE[:14],
    ),
    Edit(
        "by default the plain wire",
        "horovod/runner/common/util/network.py",
        "class BasicClient(object):\n",
        "class BasicClient(object):\n    wire = Wire\n\n",
        _CVE,
        _CVE[:14],
    ),
    Edit(
        "a worker's reply is one of two",
        "horovod/runner/elastic/worker.py",
        "class WorkerNotificationClient(network.BasicClient):\n",
        """\
class _ReplyWire(network.Wire):
    @staticmethod
    def loads(message):
        return codec.loads_only(message, (network.PingResponse, network.AckResponse))


class WorkerNotificationClient(network.BasicClient):
    wire = _ReplyWire

""",
        _CVE + "; the driver calls the registered address, so its reply is as untrusted as the request",
        _CVE[:14],
    ),
    Edit(
        "codec for a worker's reply",
        "horovod/runner/elastic/worker.py",
        "from horovod.runner.common.util import network, secret\n",
        "from horovod.runner.common.util import codec, network, secret\n",
        _CVE,
        _CVE[:14],
    ),
)
