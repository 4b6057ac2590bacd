"""What commands that use etcd have in common: options. Must not know the log in it."""

from typing import Final

import click

from ..auth.secret_files import TlsFiles
from ..log.etcd_client import parse_member
from ..server.etcd_options import EtcdOptions
from .options import add_options

etcd_options: Final = add_options(
    click.option("--etcd-ca", metavar="FILE", help="CA of etcd's certificates, for https:// URLs."),
    click.option("--etcd-cert", metavar="FILE", help="Certificate to present to etcd; needs --etcd-key."),
    click.option("--etcd-key", metavar="FILE", help="Its key."),
    click.option(
        "--etcd-user", metavar="NAME:PASSWORD", envvar="TCPSTORE_ETCD_USER", show_envvar=True, help="User of etcd."
    ),
)


def parse_etcd(ctx: click.Context, param: click.Parameter, text: str | None) -> list[str]:
    """Return the URLs of etcd's members."""
    urls = [] if text is None else [url.strip() for url in text.split(",")]
    try:
        secure = {parse_member(url)[0] for url in urls}
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    if len(secure) > 1:
        raise click.BadParameter("either all URLs begin with https://, or none", ctx, param)
    return urls


def to_etcd(
    urls: list[str], name: str | None, ca: str | None, cert: str | None, key: str | None, user: str | None
) -> EtcdOptions | None:
    """Return what the options say. Raises UsageError."""
    if not urls:
        if name or ca or cert or key:
            raise click.UsageError("--store-name, --etcd-ca, --etcd-cert and --etcd-key need --etcd.")
        return None
    if bool(cert) != bool(key):
        raise click.UsageError("--etcd-cert and --etcd-key must be given together.")
    tls = TlsFiles(ca or "", cert or "", key or "") if parse_member(urls[0])[0] else None
    return EtcdOptions(urls, name or "default", tls, user or "")
