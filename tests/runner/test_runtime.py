"""The interpreter's needs on the host: the links by which programs name shared libraries."""

from pathlib import Path

from cellwright.runner.host.runtime import loader_links, sonames


def test_the_dynamic_loader_is_found_where_programs_name_it(tmp_path: Path) -> None:
    """On aarch64 that is a link in /lib: without it no program starts (found on host e)."""
    place, other = tmp_path / "lib", tmp_path / "other"
    (place / "aarch64-linux-gnu").mkdir(parents=True)
    loader = place / "aarch64-linux-gnu/ld-linux-aarch64.so.1"
    loader.touch()
    (place / loader.name).symlink_to("aarch64-linux-gnu/ld-linux-aarch64.so.1")
    other.symlink_to("lib")
    places = (str(place), str(other))
    assert loader_links(loader, places) == [(str(place / loader.name), str(loader))]
    (place / "libc.so.6").symlink_to(loader)
    assert loader_links(place / "libc.so.6", places) == []


def test_a_library_is_found_by_its_other_names(tmp_path: Path) -> None:
    library = tmp_path / "libz.so.1.2.13"
    library.touch()
    (tmp_path / "libz.so.1").symlink_to(library.name)
    (tmp_path / "libz.so.0").symlink_to("elsewhere")
    assert sonames(library) == [(str(tmp_path / "libz.so.1"), library.name)]
