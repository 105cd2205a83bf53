"""Mutations of the rules by which root of an image is root of its own files alone."""

from tests.mutations import Edit, Mutation, drop, drop_flag, replace

_ASKED = ("tests/escapes/test_images.py",)
_PORTS = (
    "tests/escapes/test_images.py::test_every_id_of_an_image_listens_on_low_ports_of_its_cell_alone",
)
_CELLS = ("tests/harness/images/test_image_cells.py",)
_PRIVILEGES, _ENTER, _ROOT = (
    "runner/cell/privileges.py",
    "runner/cell/enter.py",
    "runner/cell/image_root.py",
)
_KEPT = "privileges.OF_AN_IMAGE if plan.image else ()"


def _is(layer: str, *edits: Edit, asked: tuple[str, ...] = _ASKED) -> Mutation:
    return Mutation(layer, asked, edits)


IMAGES = (
    _is("no capability but the eight", replace(_PRIVILEGES, "", "(0, 1, 3, 4, 5, 6, 7, 31)", "(0, 1, 3, 4, 5, 6, 7, 12, 31)")),
    _is("bounding set of the eight", drop(_PRIVILEGES, "give_up_all", "kernel.drop_bounding_set")),
    _is("securebits: no capability kept", replace(
        _PRIVILEGES, "", "kernel.SECBIT_KEEP_CAPS << 1 | kernel.SECBIT_NO_CAP_AMBIENT_RAISE * _AND_LOCK", "0",
    )),
    _is("a user namespace of its own", drop(_ENTER, "confinement", "_enter_user_namespace"), drop(_ENTER, "confinement", "_enter_inner_user_namespace")),
    _is("limits of all ids together", drop(_ENTER, "confinement", "_enter_inner_user_namespace")),
    _is("the map of the kind", replace(_ENTER, "_enter_user_namespace", 'image.kind != "one"', "False")),
    _is("nosuid and nodev of the root", replace(_ROOT, "", "mounts.NOSUID | mounts.NODEV", "0")),
    _is("nothing left of the launcher's root", drop(_ROOT, "enter_image", 'do.call("umount2", b".", _MNT_DETACH, about="the launcher\'s root")')),
    _is("read-only trees beside the image", drop("runner/launcher/root.py", "enter_new_root", "mounts.make_read_only"), drop_flag("runner/cell/enter.py", "_mount_own_filesystems", "mounts.RDONLY")),
    _is("size of the changes", replace(_ROOT, "enter_image", "str(image.changes_bytes)", "'0'"), asked=_CELLS),
    _is("low ports for every id", drop(_ENTER, "confinement", "privileges.allow_all_ports"), asked=_PORTS),
    _is("the calls of the kind", replace("runner/launching/image_launcher.py", "", 'image.ids.kind == "one"', "False"), asked=_PORTS),
)  # fmt: skip
