"""What every section of a config shares: frozen, strict, no unknown keys, docstrings that become `--help`."""

import pydantic


class Section(pydantic.BaseModel):
    """Frozen and strict: an unknown key, or 3.0 where 3 is meant, is refused."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=True,
    )
