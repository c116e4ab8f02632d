"""Launch over SSH on hosts that share no files with this machine.

Usable without a plan: :class:`~accelmark.run.launchers.ssh.connection.SshConnection` runs commands on a host,
:func:`~accelmark.run.launchers.ssh.delivery.deliver` and
:func:`~accelmark.run.launchers.ssh.delivery.put_files` deliver AccelMark itself and files to it.
"""
