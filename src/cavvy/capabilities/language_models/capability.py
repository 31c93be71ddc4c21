"""What language models contribute."""

from cavvy.frame.capability import Capability, Command

_HERE = "cavvy.capabilities.language_models"
CAPABILITY = Capability(
    name="language_models",
    summary="Reach all models of a project under one address, in OpenAI's format.",
    needs=("serving",),
    commands=(
        Command(
            name="chat",
            place=f"{_HERE}.chat_command:command",
            summary="Talk to the language model of a service.",
            section="Serve requests",
            after="call",
        ),
    ),
    docs=("guides/language-models.md",),
    gateway_paths=f"{_HERE}.paths:ModelPaths",
    gateway_meters=f"{_HERE}.token_meter:EngineTerms",
    gateway_scorer=f"{_HERE}.scorer:ModelScorer",
)
