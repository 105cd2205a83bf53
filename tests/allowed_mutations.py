"""Mutations of what makes calls, files and objects safe that every program may use: answers in place of calls, the
machine of a cell, files of the distribution, terminals and System V objects."""

from tests.mutations import Edit, Mutation, drop, drop_item, replace

_LISTENER, _COMPILE = "runner/listening/cell_listener.py", "policies/compiling/compile.py"
_FILES, _MEMORY = "runner/host/system_files.py", "runner/listening/machine_files.py"
_MACHINE, _TABLES = "tests/harness/test_machine_size.py", "runner/listening/machine_files.py"
_PROGRAMS, _TERMINALS = "tests/harness/test_real_programs.py", "tests/escapes/test_terminal.py"
_GPU, _GPUS = "tests/escapes/test_gpu.py", "policies/compiling/gpus.py"
_TRACING, _TRACED = "tests/escapes/test_tracing.py", "runner/listening/cell_listener.py"
_OBJECTS, _SECCOMP = "tests/escapes/test_kernel_objects.py", "tests/escapes/test_seccomp.py"
_SET_UID = "tests/escapes/test_filesystem.py::test_no_program_is_left_set_uid_where_cells_write_to_the_host"
_NOT_LEFT_OUT = f"{_PROGRAMS}::test_a_system_file_that_is_not_roots_and_public_is_left_out"


def _is(layer: str, asked: str, *edits: Edit) -> Mutation:
    return Mutation(layer, (asked,), edits)


ALLOWED = (
    _is(
        "modes: no set-uid programs where cells write to the host",
        _SET_UID,
        replace(_COMPILE, "", "policy.filesystem.write and not {*OF_IMAGES} & {*groups}", "False"),
    ),
    _is(
        "modes: none that the listener lets go on, or the guard makes",
        _SET_UID,
        replace(_COMPILE, "", "((rule, errno.EPERM) for rule in table.set_uid)", "()"),
    ),
    _is(
        "ignored: the call is not made",
        f"{_PROGRAMS}::test_calls_that_change_nothing_succeed_in_every_profile",
        replace(
            _LISTENER,
            "Listener._refuse",
            "notifications.succeed(self._descriptor, notification)",
            "notifications.let_go_on(self._descriptor, notification)",
        ),
    ),
    _is(
        "ignored: only what a limit allows",
        _PROGRAMS,
        replace(
            _LISTENER,
            "_holds",
            "len(data) == size and all(map(operator.le, numbers, answer.at_most))",
            "True",
        ),
    ),
    _is(
        "answers: a form without one is refused",
        f"{_PROGRAMS}::test_a_call_that_would_change_something_is_refused_and_recorded",
        replace(
            _LISTENER,
            "Listener._refuse",
            "fit.errno if fit else errno.EPERM",
            "fit.errno if fit else 0",
        ),
    ),
    _is(
        "measured: processors and memory of the cell",
        _MACHINE,
        replace(_LISTENER, "Listener.__init__", "plan.measured", "{}"),
    ),
    _is(
        "machine files: seals",
        _MACHINE,
        replace(
            _MEMORY,
            "",
            "fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE",
            "0",
        ),
    ),
    _is(
        "machine files: as many as a cell may keep open",
        _MACHINE,
        replace(_MEMORY, "MemoryFiles._count", "sum(file.opened for file in self._files)", "0"),
    ),
    _is(
        "machine files: what was read of a caller that is gone",
        _MACHINE,
        replace(
            _TABLES,
            "MachineFiles.answer_open",
            "not notifications.is_waiting(self._listener, notification)",
            "False",
        ),
    ),
    _is(
        "machine files: addresses of the kernel",
        _MACHINE,
        replace(
            _TABLES, "_network", "pattern.sub(lambda found: b'0' * len(found[0]), table)", "table"
        ),
    ),
    _is(
        "machine files: given in a thread",
        _MACHINE,
        replace(
            "runner/listening/waiting_call.py",
            "Giver.give",
            "self._waiting.put((notification, descriptor, flags))",
            "hand_over(self._listener, notification, descriptor, flags)",
        ),
    ),
    _is(
        "netlink sockets that are not made yet",
        _OBJECTS,
        replace(
            "runner/listening/interfaces.py", "NetlinkSockets._has_room", "len(self._answered)", "0"
        ),
    ),
    # Under these two a test makes nothing that SIGKILL does not end: no tracee stops at its end.
    _is(
        "tracing: not in a circle",
        f"{_TRACING}::test_two_processes_do_not_trace_each_other",
        replace(_TRACED, "Tracing._why_not", "self._traces(grant.target, grant.tracers)", "False"),
    ),
    _is(
        "tracing: not by the launcher",
        f"{_TRACING}::test_the_launcher_becomes_no_tracer",
        replace(
            _TRACED,
            "Tracing._why_not",
            "parent.depth != caller.depth or parent.number == _INIT",
            "False",
        ),
    ),
    _is(
        "system files: links that lead out",
        _NOT_LEFT_OUT,
        replace(_FILES, "_matches", "lies_in(source, SYSTEM_PLACES)", "True"),
    ),
    _is(
        "system files: what a link leads to",
        _NOT_LEFT_OUT,
        replace(_FILES, "_matches", "is_roots_and_public(source)", "True"),
    ),
    _is(
        "system files: only root's",
        _NOT_LEFT_OUT,
        replace(_FILES, "is_roots_and_public", "status.st_uid != 0", "False"),
    ),
    _is(
        "GPUs: no other name",
        "tests/policies/test_gpus.py::test_no_other_name_is_a_gpu",
        replace(_GPUS, "Vendor.is_card", "re.fullmatch(self.cards, node) is not None", "True"),
    ),
    _is(
        "GPUs: character devices",
        f"{_GPU}::test_a_node_that_is_no_character_device_is_refused",
        replace("runner/host/gpu.py", "_why_not", "stat.S_ISCHR(mode)", "True"),
        replace(
            "runner/launcher/root.py",
            "_open_sources",
            "stat.S_ISCHR(os.fstat(descriptor).st_mode)",
            "True",
        ),
    ),
    _is(
        "GPUs: names of the program's own threads",
        f"{_GPU}::test_threads_can_be_named_and_nothing_else_in_proc_be_written",
        replace(_MEMORY, "", "_has_thread(notification.thread, task)", "True"),
    ),
    _is(
        "GPUs: not open in the launcher",
        f"{_GPU}::test_a_module_that_opens_the_gpu_is_not_preloaded",
        replace("runner/cell/interpreter.py", "", 'processes.open_device("self", devices)', "''"),
    ),
    _is(
        "GPUs: no copy of a session that has one open",
        f"{_GPU}::test_a_session_with_a_gpu_open_is_neither_branched_nor_paused_nor_forked",
        replace(
            "runner/sessions/branches.py",
            "",
            "processes.open_device(pid_of(held.cell.guest), devices)",
            "''",
        ),
    ),
    _is(
        "terminals: 16 in a cell",
        _TERMINALS,
        drop_item("runner/cell/enter.py", "_mount_terminals", "max"),
    ),
    _is(
        "terminals: a devpts of the cell",
        _TERMINALS,
        drop("runner/cell/enter.py", "_mount_terminals", "mounts.put"),
    ),
    _is(
        "System V: not without a memory cgroup",
        _OBJECTS,
        replace(_COMPILE, "", '("memfd_create", "shmget", "semget")', '("memfd_create",)'),
    ),
)
