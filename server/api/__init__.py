"""HTTP faces of the APIs: body validation and framing; the generation itself is an inferlet of inferlet_sdk/builtin."""
