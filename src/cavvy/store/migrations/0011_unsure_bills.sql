-- The field of an attempt that tells how much more it may have cost has another name now.
UPDATE attempts SET document = REPLACE(document, '"unseen_end":', '"unsure_bill":');
