"""`mypyc_attr`, where the package that defines it is not installed.

Only mypyc reads the decorator, and it knows it by its definition in `mypy_extensions`; at run time it does nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**attributes):
        return lambda decorated: decorated
