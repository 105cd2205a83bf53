"""Mutations of what reads hostile input outside of the layers of a cell: packages, the states of sessions that
branch or pause, and personal data."""

from tests.mutations import Edit, Mutation, drop, replace

_PACKAGES, _PAUSING = "harness/sandbox/packages", "harness/sandbox/pausing"
_ZIP, _UNPACK, _STORE = (f"{_PACKAGES}/{name}.py" for name in ("zip_archive", "unpack", "store"))
_BRANCHING, _PRIVACY = "runner/branching", "harness/privacy"
_WHEELS = "tests/harness/packages/test_hostile_wheels.py"
_SETS = "tests/harness/packages/test_store.py"
_PAUSES = "tests/harness/test_pausing.py"
_FORGED = "tests/escapes/test_forged_states.py"
_VALUES, _SCOPES = "tests/harness/privacy/test_values.py", "tests/harness/privacy/test_scope.py"
_DETECTED, _STREAMS = (
    "tests/harness/privacy/test_detectors.py",
    "tests/harness/privacy/test_streams.py",
)


def _is(layer: str, asked: str, *edits: Edit) -> Mutation:
    return Mutation(layer, (asked,), edits)


READERS = (
    # wheels
    _is("bytes between the entries of a wheel", _WHEELS, replace(_ZIP, "Archive._listed", "offset != end", "False")),
    _is("bytes around the directory of a wheel", _WHEELS,
        replace(_ZIP, "Archive._end", "start + length != after", "False")),
    _is("entry that is described in two ways", _WHEELS,
        replace(_ZIP, "Archive._placed", "_name(rest[:named], flags) != entry.name", "False")),
    _is("wheel that unpacks to more than the limit", _WHEELS,
        replace(_ZIP, "Archive._listed", "size > limits.unpacked", "False")),
    _is("checksum of an entry", _WHEELS,
        replace(_ZIP, "Archive.pieces", "(size, crc) != (entry.size, entry.crc)", "False")),
    _is("links and special files in a wheel", _WHEELS,
        replace(_ZIP, "_check_kind", "by == UNIX and kind and kind != (0o040000 if name.endswith('/') else 0o100000)", "False")),
    _is("names that lead out of a package", _WHEELS,
        replace(_ZIP, "check_names", "{'', '.', '..'} & set(parts) or '\\\\' in path or DRIVE.match(path)", "False")),
    _is("names that are one file elsewhere", _WHEELS, replace(_ZIP, "check_names", "same is not name", "False")),
    _is("file that RECORD does not list", _WHEELS,
        replace(_UNPACK, "_recorded", "names - found.keys() - exempt", "set()")),
    _is("digest in RECORD", _WHEELS,
        replace(_UNPACK, "_check_digest", "recorded and (found, str(length)) != (expected, size or str(length))", "False")),
    _is("wheel that says it is another package", _WHEELS,
        replace(_UNPACK, "_check_metadata", "told != (_plain(name), version)", "False")),
    _is("files that start by themselves (.pth)", _WHEELS,
        replace(_UNPACK, "write", "path is None or LEFT_OUT.fullmatch(path)", "path is None")),
    # sets
    _is("opened wheel that was changed", f"{_SETS}::test_a_changed_file_never_gets_into_another_set",
        replace(_STORE, "PackageStore._linked", "_changed(opened.site, manifest.files, contents=True)", "''")),
    _is("file that two packages have", f"{_SETS}::test_packages_that_have_one_file_in_two_forms_are_refused", replace(_STORE, "PackageStore._linked",
        "found.get(path, (size, digest)) != (size, digest) or other != path", "False")),
    # states of sessions
    _is("seal of a paused session", f"{_PAUSES}::test_a_changed_state_is_refused_before_it_reaches_a_cell",
        replace(f"{_PAUSING}/state_file.py", "_Seal.open", "hmac.compare_digest(self._tag(data), sealed[:_TAG_BYTES])", "True")),
    _is("place of a piece in a paused session", f"{_PAUSES}::test_pieces_are_bound_to_their_places",
        replace(f"{_PAUSING}/state_file.py", "_Seal._bound", "_NUMBER.pack(self._number)", "b''")),
    _is("paused session of another user", f"{_PAUSES}::test_a_file_that_is_not_this_users_alone_is_refused", replace(f"{_PAUSING}/store.py", "_require_own",
        "not stat.S_ISREG(mode) or status.st_uid != os.geteuid() or mode & 0o077", "False")),
    _is("paused session that has expired", f"{_PAUSES}::test_states_expire_and_are_removed",
        replace(f"{_PAUSING}/store.py", "PausedStates.taking", "until <= self._clock()", "False")),
    _is("image that was changed", f"{_PAUSES}::test_a_changed_image_is_refused",
        replace(f"{_PAUSING}/store.py", "PausedStates.image", "hashlib.sha256(data).hexdigest() != digest", "False")),
    _is("threads and processes of a branch's source", "tests/harness/test_branching.py",
        replace(f"{_BRANCHING}/state.py", "require_alone", "processes.company_of(source.pid, init)", "''"),
        replace("runner/session_branches.py", "require_alone",
                "processes.company_of(pid_of(held.cell.guest), pid_of(held.cell.pidfd))", "''")),
    _is("memory that a branch would share", "tests/runner/branching/test_layout.py",
        replace(f"{_BRANCHING}/layout.py", "_makeable", "mapping.rights[3] != 'p'", "False")),
    _is("memory laid out as no process has it", f"{_FORGED}::test_a_forged_state_is_refused_by_name",
        replace(f"{_BRANCHING}/layout.py", "parse", "edges != sorted(edges)", "False")),
    _is("descriptors of a branch's source", "tests/harness/test_branching.py", drop(f"{_BRANCHING}/state.py", "_require_streams", "_require_file")),
    # personal data
    _is("values written in another way", _DETECTED, replace(f"{_PRIVACY}/scope.py", "PrivacyScope.find", "view(plain)", "None")),
    _is("values in base64 or hexadecimal", _DETECTED,
        replace(f"{_PRIVACY}/scope.py", "PrivacyScope.find", "self._encoded_in(plain, naming)", "()")),
    _is("values of another scope", _VALUES,
        replace(f"{_PRIVACY}/values.py", "ValueVault.known", "each.scope == scope", "True")),
    _is("value that has expired", _VALUES,
        replace(f"{_PRIVACY}/values.py", "ValueVault.value_of", "stored.until > self._clock()", "True")),
    _is("place at which no rule restores a value", _SCOPES,
        replace(f"{_PRIVACY}/scope.py", "PrivacyScope.restored", "place.is_named", "True")),
    _is("share of the vault of one scope", _VALUES, replace(f"{_PRIVACY}/values.py", "ValueVault._is_full",
        "max(1, self._most * 3 // 4)", "self._most + 1")),
    _is("guesses that a program wrote into a call", "tests/harness/privacy/test_guesses.py",
        replace(f"{_PRIVACY}/naming.py", "CallNaming.normal", "self.written.has_guesses", "False")),
    _is("value that is cut by the end of a piece", _STREAMS,
        replace(f"{_PRIVACY}/streams.py", "StreamGuard._cut", "self._within_line(text)", "len(text)")),
)  # fmt: skip
