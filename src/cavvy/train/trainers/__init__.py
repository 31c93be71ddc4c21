"""Resume, data order and notices of Cavvy for the trainers of Hugging Face and Lightning."""
