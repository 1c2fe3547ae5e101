"""Edits that keep a rank's environment, and the run's key in it, out of every command line."""

from hvdtrain.build.table import Edit

_GLOO_RUN = "horovod/runner/gloo_run.py"
_LAUNCH = "horovod/runner/launch.py"
_SHELL = "horovod/runner/common/util/safe_shell_exec.py"
_REMOTE = "horovod/runner/util/remote.py"
_DRIVER = "horovod/runner/driver/driver_service.py"
_PS = "whoever is on the host reads it in ps"

_KEY = (
    Edit(
        "the run's key",
        "horovod/runner/common/util/secret.py",
        "HOROVOD_SECRET_KEY = '_HOROVOD_SECRET_KEY'\n",
        """\
HOROVOD_SECRET_KEY = '_HOROVOD_SECRET_KEY'
HOROVOD_RENDEZVOUS_KEY = 'HOROVOD_RENDEZVOUS_KEY'


def rendezvous_key():
    \"\"\"The 32 bytes by which this run's processes know one another. Raises ValueError where there are none.\"\"\"
    if HOROVOD_RENDEZVOUS_KEY not in os.environ:
        raise ValueError(HOROVOD_RENDEZVOUS_KEY + ' is not set: start with horovodrun or horovod.run, which set it.')
    try:
        key = bytes.fromhex(os.environ[HOROVOD_RENDEZVOUS_KEY])
    except ValueError:
        key = b''
    if len(key) != SECRET_LENGTH:
        raise ValueError(HOROVOD_RENDEZVOUS_KEY + ' must be 64 hexadecimal digits; unset it, and one is made.')
    return key


def launcher_key():
    \"\"\"The key that the environment gives, or a new one.\"\"\"
    return rendezvous_key() if HOROVOD_RENDEZVOUS_KEY in os.environ else make_secret_key()
""",
        "the rendezvous, and what else the ranks serve one another, hears only who knows it",
    ),
    Edit(
        "the run's key is a setting",
        "horovod/runner/common/util/settings.py",
        "        self.key = key\n",
        "        self.key = key\n        self.rendezvous_key = secret.launcher_key()\n",
        "the launcher, the rendezvous and the ranks share one",
    ),
    Edit(
        "the run's key is not pickled",
        "horovod/runner/common/util/settings.py",
        "\n\nclass Settings(BaseSettings):\n",
        """\

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != 'rendezvous_key'}


class Settings(BaseSettings):
""",
        "Horovod on Spark writes its settings into command lines",
    ),
    Edit(
        "settings import the key",
        "horovod/runner/common/util/settings.py",
        "\n\nclass BaseSettings(object):\n",
        "\nfrom horovod.runner.common.util import secret\n\n\nclass BaseSettings(object):\n",
        "as above",
    ),
    Edit(
        "every controller's ranks have the key",
        _LAUNCH,
        "def _launch_job(args, settings, nics, command):\n    env = os.environ.copy()\n",
        """\
def _launch_job(args, settings, nics, command):
    env = {**os.environ, secret.HOROVOD_RENDEZVOUS_KEY: settings.rendezvous_key.hex()}
""",
        "mpirun gets it by name (-x), the ranks of Gloo as the rest of their environment",
    ),
)

_RANKS = (
    Edit(
        "a rank's variables are no text",
        _GLOO_RUN,
        """\
    env = copy.copy(env)  # copy env so we do not leak env modifications
    env['PYTHONUNBUFFERED'] = '1'
""",
        """\
    env = {name: value for name, value in env.items() if env_util.is_exportable(name)}
    env['PYTHONUNBUFFERED'] = '1'
""",
        _PS,
    ),
    Edit(
        "a rank's command and its environment",
        _GLOO_RUN,
        """\
        env_vars = create_slot_env_vars(slot_info)
        horovod_rendez_env = " ".join(
            [f"{k}={str(v)}" for k, v in env_vars.items()])

        return '{shell} {horovod_env} {env} {run_command}' .format(
            shell='env',
            horovod_env=horovod_rendez_env,
            env=' '.join(['%s=%s' % (key, quote(value)) for key, value in env.items()
                          if env_util.is_exportable(key)]),
            run_command=run_command)
""",
        "        return run_command, {**env, **create_slot_env_vars(slot_info)}\n",
        _PS,
    ),
    Edit(
        "Horovod's variables are no text",
        _GLOO_RUN,
        """\
    env_vars = create_run_env_vars(server_ip, nics, port, elastic)
    env_string = " ".join(
        [f"{k}={str(v)}" for k, v in env_vars.items()])
    run_command = (
        '{env_string} '
        '{command}'  # expect a lot of environment variables
        .format(env_string=env_string,
                command=' '.join(quote(par) for par in command)))
    return run_command
""",
        """\
    return ' '.join(quote(par) for par in command)


def get_run_env(settings, env, server_ip, nics, port, elastic=False):
    run_env = create_run_env_vars(server_ip, nics, port, elastic)
    return {**(env or {}),
            **{name: str(value) for name, value in run_env.items()},
            secret.HOROVOD_RENDEZVOUS_KEY: settings.rendezvous_key.hex()}
""",
        _PS,
    ),
    Edit(
        "secret for Gloo's launcher",
        _GLOO_RUN,
        "from horovod.runner.common.util import env as env_util, safe_shell_exec\n",
        "from horovod.runner.common.util import env as env_util, safe_shell_exec, secret\n",
        "as above",
    ),
    Edit(
        "Gloo's ranks have their environment",
        _GLOO_RUN,
        """\
    slot_info_to_command = _slot_info_to_command_fn(run_command, env)
    event = register_shutdown_event()
    args_list = [[slot_info_to_command(slot_info), slot_info, [event]]
                 for slot_info in host_alloc_plan]
""",
        """\
    run_env = get_run_env(settings, env, server_ip, nics, global_rendezv_port)
    slot_info_to_command = _slot_info_to_command_fn(run_command, run_env)
    event = register_shutdown_event()
    args_list = []
    for slot_info in host_alloc_plan:
        rank_command, rank_env = slot_info_to_command(slot_info)
        args_list.append([rank_command, slot_info, [event], rank_env])
""",
        _PS,
    ),
    Edit(
        "elastic ranks have their environment",
        _GLOO_RUN,
        """\
        create_worker = _create_elastic_worker_fn(exec_command, run_command, env, event)
""",
        """\
        run_env = get_run_env(settings, env, server_ip, nics, global_rendezv_port, elastic=True)
        create_worker = _create_elastic_worker_fn(exec_command, run_command, run_env, event)
""",
        _PS,
    ),
    Edit(
        "an elastic rank's environment beside its command",
        _GLOO_RUN,
        """\
        command = get_command_with_env(slot_info)
        events = [event] + (events or [])
        return exec_command(command, slot_info, events)
""",
        """\
        command, rank_env = get_command_with_env(slot_info)
        events = [event] + (events or [])
        return exec_command(command, slot_info, events, rank_env)
""",
        _PS,
    ),
    Edit(
        "the environment here and over ssh",
        _GLOO_RUN,
        """\
    def _exec_command(command, slot_info, events):
        index = slot_info.rank
""",
        """\
    def _exec_command(command, slot_info, events, env):
        index = slot_info.rank
        stdin = None
""",
        _PS,
    ),
    Edit(
        "over ssh by standard input",
        _GLOO_RUN,
        """\
            local_command = quote('cd {pwd} > /dev/null 2>&1 ; {command}'
                                  .format(pwd=os.getcwd(), command=command))
            command = get_remote_command(local_command,
                                         host=host_name,
                                         port=settings.ssh_port,
                                         identity_file=settings.ssh_identity_file)
""",
        """\
            stdin = pack_command('cd {pwd} > /dev/null 2>&1 ; {command}'
                                 .format(pwd=quote(os.getcwd()), command=command), env)
            command = get_remote_command(RECEIVER,
                                         host=host_name,
                                         port=settings.ssh_port,
                                         identity_file=settings.ssh_identity_file,
                                         reads=True)
""",
        _PS + ", on both hosts",
    ),
    Edit(
        "Gloo's launcher imports the receiver",
        _GLOO_RUN,
        "from horovod.runner.util.remote import get_remote_command\n",
        "from horovod.runner.util.remote import RECEIVER, get_remote_command, pack_command\n",
        "as above",
    ),
    Edit(
        "here as the process's environment",
        _GLOO_RUN,
        """\
            exit_code = safe_shell_exec.execute(command,
                                                index=index,
""",
        """\
            exit_code = safe_shell_exec.execute(command,
                                                env=None if stdin else {**os.environ, **env},
                                                stdin=stdin,
                                                index=index,
""",
        _PS,
    ),
    Edit(
        "Spark's tasks get the environment too",
        "horovod/spark/gloo_run.py",
        "    def _exec_command(command, slot_info, events):\n",
        """\
    def _exec_command(command, slot_info, events, rank_env):
        task_env = {**rank_env, **(env or {})}
""",
        "what the command line held before is in the environment now",
    ),
    Edit(
        "Spark's tasks get it by their service",
        "horovod/spark/gloo_run.py",
        "host, command, env, local_rank, verbose,\n",
        "host, command, task_env, local_rank, verbose,\n",
        "as above",
    ),
)

_OVER_SSH = (
    Edit(
        "a command and its environment are received",
        _REMOTE,
        "from horovod.runner.common.util import env as env_util\n",
        """\
import json
import sys
from shlex import quote

from horovod.runner.common.util import env as env_util

# What ssh starts on the other host: it reads a command and its environment, and becomes the command.
RECEIVER = quote('exec {} -ISc {}'.format(quote(sys.executable), quote(
    'import json, os, sys; command, env = json.load(sys.stdin); '
    'os.dup2(os.open(os.devnull, os.O_RDONLY), 0); '
    'os.execve("/bin/sh", ["/bin/sh", "-c", command], {**os.environ, **env})')))


def pack_command(command, env):
    \"\"\"What the receiver reads.\"\"\"
    return json.dumps([command, env]).encode()

""",
        _PS + ", on both hosts",
    ),
    Edit(
        "who reads must be able to",
        _REMOTE,
        """\
def get_remote_command(local_command, host, port=None, identity_file=None, timeout_s=None):
""",
        """\
def get_remote_command(local_command, host, port=None, identity_file=None, timeout_s=None, reads=False):
    if reads and env_util.is_kubeflow_mpi():
        raise RuntimeError('{} passes no standard input on, by which ranks get their environment: '
                           'use --mpi there.'.format(env_util.KUBEFLOW_MPI_EXEC))
""",
        "kubectl exec without -i would start ranks that read nothing and end",
    ),
    Edit(
        "a command's standard input",
        _SHELL,
        "def _exec_middleman(command, env, exit_event, stdout, stderr, rw):\n",
        """\
def _feed(pipe, data):
    with contextlib.suppress(OSError), pipe:  # the command may end before it has read
        pipe.write(data)


def _exec_middleman(command, env, exit_event, stdout, stderr, rw, stdin):
""",
        "secrets are read there, since a command line is public",
    ),
    Edit(
        "contextlib for it",
        _SHELL,
        "import codecs\n",
        "import codecs\nimport contextlib\n",
        "as above",
    ),
    Edit(
        "standard input is fed",
        _SHELL,
        """\
    executor_shell = subprocess.Popen(command, shell=True, env=env,
                                      stdout=stdout_w, stderr=stderr_w)
""",
        """\
    executor_shell = subprocess.Popen(command, shell=True, env=env,
                                      stdin=None if stdin is None else subprocess.PIPE,
                                      stdout=stdout_w, stderr=stderr_w)
    if stdin is not None:
        in_thread(_feed, (executor_shell.stdin, stdin))
""",
        "as above",
    ),
    Edit(
        "standard input is an argument",
        _SHELL,
        """\
            prefix_output_with_timestamp=False):
    \"\"\"
    Execute the given""",
        """\
            prefix_output_with_timestamp=False, stdin=None):
    \"\"\"
    Execute the given""",
        "as above",
    ),
    Edit(
        "standard input goes to the middleman",
        _SHELL,
        "                                                          (r, w)))\n",
        "                                                          (r, w), stdin))\n",
        "as above",
    ),
)

_SERVICES = (
    Edit(
        "a task service reads its arguments",
        "horovod/runner/task_fn.py",
        """\
    if len(sys.argv) != 5:
        print('Usage: {} <index> <num_hosts> <driver_addresses> <settings>'.format(sys.argv[0]))
        sys.exit(1)

    index = codec.loads_base64(sys.argv[1])
    num_hosts = codec.loads_base64(sys.argv[2])
    driver_addresses = codec.loads_base64(sys.argv[3])
    settings = codec.loads_base64(sys.argv[4])
""",
        """\
    # On standard input: the settings hold the key of the services.
    index, num_hosts, driver_addresses, settings = map(codec.loads_base64, sys.stdin.buffer.read().split())
""",
        _PS + ", and with the key signs what the services unpickle",
    ),
    Edit(
        "a task service is started without arguments",
        _DRIVER,
        """\
        command = \\
            '{python} -m horovod.runner.task_fn {index} {num_hosts} ' \\
            '{driver_addresses} {settings}' \\
            .format(python=sys.executable,
                    index=codec.dumps_base64(index),
                    num_hosts=codec.dumps_base64(num_hosts),
                    driver_addresses=codec.dumps_base64(driver_addresses),
                    settings=codec.dumps_base64(settings))
""",
        """\
        command = '{python} -m horovod.runner.task_fn'.format(python=sys.executable)
        stdin = b'\\n'.join(codec.dumps_base64(argument, to_ascii=False)
                           for argument in (index, num_hosts, driver_addresses, settings))
""",
        _PS,
    ),
    Edit(
        "a task service's arguments over ssh",
        _DRIVER,
        "                                         identity_file=settings.ssh_identity_file)\n",
        """\
                                         identity_file=settings.ssh_identity_file,
                                         reads=True)
""",
        "as above",
    ),
    Edit(
        "a task service is given its arguments",
        _DRIVER,
        "        args_list.append([command])\n",
        "        args_list.append([command, stdin])\n",
        "as above",
    ),
    Edit(
        "a task service's standard input",
        _DRIVER,
        """\
    def _exec_command(command):
        host_output = io.StringIO()
        try:
            exit_code = safe_shell_exec.execute(command,
""",
        """\
    def _exec_command(command, stdin):
        host_output = io.StringIO()
        try:
            exit_code = safe_shell_exec.execute(command,
                                                stdin=stdin,
""",
        "as above",
    ),
)

LAUNCHER_SECRETS = (*_KEY, *_RANKS, *_OVER_SSH, *_SERVICES)
