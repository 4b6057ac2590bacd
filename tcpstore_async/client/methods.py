"""Methods that are declared once, for all stores: each sends one request, which is answered at once.

A declaration is a function that returns the request and what makes the method's result of the reply. Synchronous stores
have it as a method, the async client as a coroutine, with the same parameters, result type and docstring. It must name
its keys `key` or `keys`, before which a PrefixStore puts its prefix.

Not declared here but written in each class: methods that block or make several requests, and those that are called so
often that half a microsecond counts. This module must not know how a request is sent.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar, get_args, overload

from . import requests
from .requests import Request

P = ParamSpec("P")
T = TypeVar("T")

Call = tuple[Request, Callable[[Any], T]]
"""A request, and the function that makes the method's result of the reply."""


class Method(Generic[P, T]):
    """A method that is declared by the function that returns its call."""

    def __init__(self, declaration: Callable[Concatenate[Any, P], Call[T]]) -> None:
        self.call: Final = declaration
        self.name: Final = declaration.__name__
        self.parameters: Final = tuple(inspect.signature(declaration).parameters)[1:]

        def function(store: "SyncMethods", /, *given: P.args, **named: P.kwargs) -> T:
            return store._perform(self, *given, **named)

        async def coroutine(store: "AsyncMethods", /, *given: P.args, **named: P.kwargs) -> T:
            request, result = declaration(store, *given, **named)
            return result(await store._send(request))

        self.function: Final = _described(function, declaration)
        self.coroutine: Final = _described(coroutine, declaration)

    if TYPE_CHECKING:  # what `store.method` is; when the program runs, stores have the functions themselves

        @overload
        def __get__(self, store: "SyncMethods", kind: type) -> Callable[P, T]: ...
        @overload
        def __get__(self, store: "AsyncMethods", kind: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
        @overload
        def __get__(self, store: None, kind: "type[SyncMethods]") -> Callable[Concatenate["SyncMethods", P], T]: ...
        @overload
        def __get__(
            self, store: None, kind: "type[AsyncMethods]"
        ) -> Callable[Concatenate["AsyncMethods", P], Coroutine[Any, Any, T]]: ...
        def __get__(self, store: Any, kind: Any) -> Any: ...


def _described(function: Any, declaration: Callable[..., Any]) -> Any:
    """Give a function the name, docstring and signature of a declaration."""
    functools.update_wrapper(function, declaration)
    signature = inspect.signature(declaration, eval_str=True)
    _, conversion = get_args(signature.return_annotation)
    _, result = get_args(conversion)
    function.__annotations__ = {**declaration.__annotations__, "return": result}
    function.__signature__ = signature.replace(return_annotation=result)
    return function


class Methods:
    """The declarations."""

    @Method
    def num_keys(self) -> Call[int]:
        """Return the number of keys, including those that PyTorch keeps for itself, as in PyTorch."""
        return requests.NUM_KEYS, int


DECLARED: Final[dict[str, Method[..., Any]]] = {
    name: one for name, one in vars(Methods).items() if isinstance(one, Method)
}


class SyncMethods(Methods):
    """The declared methods, for synchronous stores."""

    def _perform(self, method: Method[P, T], /, *given: P.args, **named: P.kwargs) -> T:
        """Execute a declared method."""
        request, result = method.call(self, *given, **named)
        return result(self._send(request))

    def _send(self, request: Request) -> Any:
        """Send the request of a declared method, and return the reply."""
        raise NotImplementedError(f"this store has no {request[0].method}")


class AsyncMethods(Methods):
    """The declared methods as coroutines, for the async client."""

    def _send(self, request: Request) -> Awaitable[Any]:
        """Send the request of a declared method, and return the reply."""
        raise NotImplementedError


for _name, _method in DECLARED.items():
    setattr(SyncMethods, _name, _method.function)
    setattr(AsyncMethods, _name, _method.coroutine)
