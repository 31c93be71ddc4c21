cat > "$REMUDA_FOLDER/boot.json" <<'END_OF_BOOT'
@BOOT@
END_OF_BOOT
cat > "$REMUDA_FOLDER/boot.py" <<'END_OF_PYTHON'
@PYTHON@
END_OF_PYTHON
remuda_start && remuda_fetch @AGENT@ agent.pyz && @TOKENS@ && $REMUDA_PYTHON -I -S "$REMUDA_FOLDER/boot.py" "$REMUDA_PYTHON"
remuda_say "the work is over, or never came; this machine ends itself"
shutdown -h now || poweroff -f
