cat > "$CAVVY_FOLDER/boot.json" <<'END_OF_BOOT'
@BOOT@
END_OF_BOOT
cat > "$CAVVY_FOLDER/boot.py" <<'END_OF_PYTHON'
@PYTHON@
END_OF_PYTHON
@ENGINE@
cavvy_start && cavvy_fetch @AGENT@ agent.pyz && @TOKENS@ && $CAVVY_PYTHON -I -S "$CAVVY_FOLDER/boot.py" "$CAVVY_PYTHON"
cavvy_say "the work is over, or never came; this machine ends itself"
shutdown -h now || poweroff -f
