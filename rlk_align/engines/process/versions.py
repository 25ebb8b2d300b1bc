"""The versions of packages in an interpreter. It also runs as a script in an interpreter that may
have no packages, so it imports only the standard library.
"""

import functools
import json
import sys


def versions(distributions, modules=()):  # type: ignore[no-untyped-def]
    """Distribution -> version, None for a missing one; of `modules`, those that contain them."""
    from importlib import metadata

    names = set(distributions)
    if modules:
        names.update(d for m in modules for d in holders().get(m, ()))
    installed: dict = {}
    for name in sorted(names):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = None
    return installed


@functools.lru_cache(maxsize=None)  # noqa: UP033 - a Python too old must be able to say so
def holders():  # type: ignore[no-untyped-def]
    """Module -> the distributions that contain it; cached, because it reads every file list."""
    from importlib import metadata

    return metadata.packages_distributions()


if __name__ == "__main__":
    report = {"python": ".".join(map(str, sys.version_info[:3]))}
    if sys.version_info >= (3, 10):  # noqa: UP036 - a Python too old must be able to say so
        asked = json.loads(sys.argv[1])
        report["versions"] = versions(asked["distributions"], asked["modules"])
    print(json.dumps(report))
