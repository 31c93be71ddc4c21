cat > "$CAVVY_FOLDER/boot.json" <<'END_OF_BOOT'
@BOOT@
END_OF_BOOT
cat > "$CAVVY_FOLDER/boot.py" <<'END_OF_PYTHON'
@PYTHON@
END_OF_PYTHON
if [ -d /etc/apt/apt.conf.d ]; then # upgrades must not replace a driver or reboot; "apt-get" waits for its lock
  printf 'APT::Periodic::Enable "0";\nDPkg::Lock::Timeout "300";\n' >/etc/apt/apt.conf.d/99cavvy
  chmod 644 /etc/apt/apt.conf.d/99cavvy
  systemctl stop apt-daily.timer apt-daily-upgrade.timer
fi >/dev/null 2>&1
@ENGINE@
cavvy_start && cavvy_fetch @AGENT@ agent.pyz && @TOKENS@ && $CAVVY_PYTHON -I -S "$CAVVY_FOLDER/boot.py" "$CAVVY_PYTHON"
cavvy_say "the work is over, or never came; this machine ends itself"
shutdown -h now || poweroff -f
