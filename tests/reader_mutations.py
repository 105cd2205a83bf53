"""Mutations of what reads hostile input outside of the layers of a cell: packages, images, the states of sessions
that branch or pause, and personal data."""

from tests.mutations import Edit, Mutation, drop, replace

_PACKAGES, _PAUSING = "harness/sandbox/packages", "harness/sandbox/sessions"
_ZIP, _UNPACK, _STORE = (
    f"{_PACKAGES}/{name}.py" for name in ("zip_archive", "unpack", "package_store")
)
_IMAGES = "harness/sandbox/images"
_WRITER, _TREE, _PROCESS, _REGISTRY = (
    f"{_IMAGES}/{name}.py"
    for name in ("layer_writer", "tree_archive", "layer_process", "image_registry")
)
_IMAGE_TESTS, _PULLS, _CHANGES = (
    f"tests/harness/images/{name}.py"
    for name in ("test_image_store", "test_registry", "test_changes")
)
_CONFINED = f"{_IMAGE_TESTS}::test_the_process_that_unpacks_is_confined"
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
    # images
    _is("name of a layer that leads upwards", _IMAGE_TESTS, replace(_WRITER, "_names", "b'..' in names", "False")),
    _is("file of a layer below a link", _IMAGE_TESTS,
        replace(_WRITER, "LayerWriter._directory", "files.open_inside if self._merges else files.open_beneath", "files.open_inside")),
    _is("link of a layer to no file of it", _IMAGE_TESTS,
        replace(_WRITER, "LayerWriter._link", "kind not in (stat.S_IFREG, stat.S_IFLNK)", "False")),
    _is("name that a whiteout cannot have", _IMAGE_TESTS,
        replace(_WRITER, "LayerWriter._white_out", "name in (b'', b'.', b'..')", "False")),
    _is("bytes of a layer", _IMAGE_TESTS, replace(_WRITER, "LayerWriter._put_file", "self._bytes > self._most_bytes", "False")),
    _is("bytes of all layers of an image", f"{_IMAGE_TESTS}::test_the_limits_are_those_of_all_layers_together",
        replace(f"{_IMAGES}/layer_store.py", "less", "limits.total_bytes - size_bytes", "limits.total_bytes")),
    _is("expansion of a layer", _IMAGE_TESTS,
        replace(f"{_IMAGES}/layer_stream.py", "LayerStream._check", "self._total > self._most", "False")),
    _is("digest of a layer", _IMAGE_TESTS,
        replace(f"{_IMAGES}/layer_store.py", "_check_blob", "blob.digest and found != blob.digest", "False")),
    _is("layer that is not that of the configuration", _IMAGE_TESTS, replace(f"{_IMAGES}/image_store.py", "ImageStore._keep",
        "wanted is not None and wanted[number] != f'sha256:{diff}'", "False")),
    _is("directory that others can enter", f"{_IMAGE_TESTS}::test_other_users_reach_no_file_of_the_store",
        drop(f"{_IMAGES}/layer_store.py", "LayerStore.made", "os.chmod")),
    _is("root of the process that unpacks", _CONFINED, drop(_PROCESS, "_serve", "os.chroot")),
    _is("capabilities of the process that unpacks", _CONFINED, drop(_PROCESS, "_serve", "credentials.clear_capabilities")),
    _is("filter of the process that unpacks", _CONFINED, drop(_PROCESS, "_serve", "confinement.confine")),
    _is("file of a cell that would remove another", _CHANGES,
        replace(_TREE, "TreeArchive._write_directory", "name.startswith(_WHITEOUT)", "False")),
    _is("content of a change that lies elsewhere", _CHANGES, replace(_TREE, "TreeArchive._add_open_file",
        "self._is_upper and _attribute(file, each) is not None", "False")),
    _is("bytes of changes", _CHANGES, replace(_TREE, "TreeArchive._count_bytes", "self._bytes > self._limits.total_bytes", "False")),
    _is("manifest that is not that of the digest", _PULLS,
        drop(_REGISTRY, "Registry._manifest", "checked")),
    _is("token that goes to another origin", _PULLS, replace(_REGISTRY, "Registry._following",
        "self._authorization and target.origin == own", "self._authorization")),
    _is("images over plain HTTP", _PULLS, replace(_REGISTRY, "Registry._get",
        "target.scheme == 'http' and (not (self._is_plain and self._may_be_plain(target)))", "False")),
    # states of sessions
    _is("seal of a paused session", f"{_PAUSES}::test_a_changed_state_is_refused_before_it_reaches_a_cell",
        replace(f"{_PAUSING}/state_file.py", "_Seal.open", "hmac.compare_digest(self._tag(data), sealed[:_TAG_BYTES])", "True")),
    _is("place of a piece in a paused session", f"{_PAUSES}::test_pieces_are_bound_to_their_places",
        replace(f"{_PAUSING}/state_file.py", "_Seal._bound", "_NUMBER.pack(self._number)", "b''")),
    _is("paused session of another user", f"{_PAUSES}::test_a_file_that_is_not_this_users_alone_is_refused", replace(f"{_PAUSING}/pause_store.py", "_require_own",
        "not stat.S_ISREG(mode) or status.st_uid != os.geteuid() or mode & 0o077", "False")),
    _is("paused session that has expired", f"{_PAUSES}::test_states_expire_and_are_removed",
        replace(f"{_PAUSING}/pause_store.py", "PausedStates.taking", "until <= self._clock()", "False")),
    _is("image that was changed", f"{_PAUSES}::test_a_changed_image_is_refused",
        replace(f"{_PAUSING}/pause_store.py", "PausedStates.image", "hashlib.sha256(data).hexdigest() != digest", "False")),
    _is("threads and processes of a branch's source", "tests/harness/test_branching.py",
        replace(f"{_BRANCHING}/kernel_state.py", "require_alone", "processes.company_of(source.pid, init)", "''"),
        replace("runner/sessions/branches.py", "_require_alone",
                "processes.company_of(pid_of(held.cell.guest), pid_of(held.cell.pidfd))", "''")),
    _is("memory that a branch would share", "tests/runner/branching/test_layout.py",
        replace(f"{_BRANCHING}/layout.py", "_makeable", "mapping.rights[3] != 'p'", "False")),
    _is("memory laid out as no process has it", f"{_FORGED}::test_a_forged_state_is_refused_by_name",
        replace(f"{_BRANCHING}/layout.py", "parse", "edges != sorted(edges)", "False")),
    _is("descriptors of a branch's source", "tests/harness/test_branching.py", drop(f"{_BRANCHING}/kernel_state.py", "_require_streams", "_require_file")),
    # personal data
    _is("values written in another way", _DETECTED, replace(f"{_PRIVACY}/scope.py", "PrivacyScope.find", "view(plain)", "None")),
    _is("values in base64 or hexadecimal", _DETECTED,
        replace(f"{_PRIVACY}/scope.py", "PrivacyScope.find", "self._encoded_in(plain, naming)", "()")),
    _is("values of another scope", _VALUES,
        replace(f"{_PRIVACY}/value_vault.py", "ValueVault.known", "each.scope == scope", "True")),
    _is("value that has expired", _VALUES,
        replace(f"{_PRIVACY}/value_vault.py", "ValueVault.value_of", "stored.until > self._clock()", "True")),
    _is("place at which no rule restores a value", _SCOPES,
        replace(f"{_PRIVACY}/scope.py", "PrivacyScope.restored", "place.is_named", "True")),
    _is("share of the vault of one scope", _VALUES, replace(f"{_PRIVACY}/value_vault.py", "ValueVault._is_full",
        "max(1, self._most * 3 // 4)", "self._most + 1")),
    _is("guesses that a program wrote into a call", "tests/harness/privacy/test_guesses.py",
        replace(f"{_PRIVACY}/naming.py", "CallNaming.normal", "self.written.has_guesses", "False")),
    _is("value that is cut by the end of a piece", _STREAMS,
        replace(f"{_PRIVACY}/streams.py", "StreamGuard._cut", "self._within_line(text)", "len(text)")),
)  # fmt: skip
