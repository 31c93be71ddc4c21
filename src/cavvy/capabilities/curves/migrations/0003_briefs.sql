-- Brief versions of pieces have another form (`briefs.py`). Those of before are left out: the whole
-- pieces are read.
UPDATE curves SET brief = NULL;
