-- An allocation may hold a part of one device; such a device has no row in held_devices.
ALTER TABLE allocations ADD COLUMN part DOUBLE PRECISION DEFAULT 1 NOT NULL;
