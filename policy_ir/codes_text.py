"""KV0xx: what is wrong with the text of a policy and the shape of its parts."""

from __future__ import annotations

from kvir.policy_ir.codes import Code

TEXT: dict[str, Code] = {
    # ---- reading -------------------------------------------------------------------------------------------
    "KV001": Code(
        "the file cannot be read",
        "The policy file does not exist, is a folder, or may not be read by this user.",
        "Nothing can be said about a policy that is not there.",
        "kvir check chat.iir",
        "kvir check chat.ir",
    ),
    "KV002": Code(
        "the text is too large",
        "The text has more than 512 KiB.",
        "A policy is a few lines; the largest, a windows table for a big"
        " model, is about 150 kB. The limit keeps a"
        " wrong file, or a hostile one, from taking time and memory.",
        "kvir check model.safetensors",
        "kvir check policy.ir",
    ),
    "KV003": Code(
        "the text is not UTF-8",
        "A byte sequence of the file is not valid UTF-8.",
        "Columns and names would mean different things in different places.",
        "name: caf\\xe9",
        "name: café        # saved as UTF-8",
    ),
    "KV004": Code(
        "byte order mark",
        "The file begins with the bytes EF BB BF.",
        "UTF-8 has no byte order; the mark would become part of the first key.",
        "\\ufeffkvir: 1",
        "kvir: 1",
    ),
    "KV005": Code(
        "a character that is not text",
        "The file holds a control character, a direction mark, a lone surrogate,"
        " or a line break that editors do not"
        " agree on (NEL, LS, PS).",
        "Such a character makes the text look different from what is read.",
        "name: long\\x00chat",
        "name: long-chat",
    ),
    "KV006": Code(
        "not YAML",
        "The text breaks the rules of YAML: a bracket or quote is not closed, indentation is wrong, a tab"
        " indents.",
        "Reading stops here, so only what stands before this place has been checked.",
        "keep: [{sink: 4}, {recent: 64}",
        "keep: [{sink: 4}, {recent: 64}]",
    ),
    "KV007": Code(
        "no policy in the file",
        "The file is empty, or holds only comments.",
        "An empty file is more often an accident than a wish to keep everything.",
        "# to do",
        "kvir: 1\nname: keep-all",
    ),
    "KV008": Code(
        "more than one document",
        "A line `---` begins a second YAML document.",
        "A server runs one policy; which of the two would be a guess.",
        "kvir: 1\nname: one\n---\nkvir: 1\nname: two",
        "kvir: 1\nname: one",
    ),
    "KV009": Code(
        "anchor or alias",
        "The text uses `&name` or `*name`.",
        "Aliases let a few lines expand into millions of nodes, and errors would point at the wrong place.",
        "rules:\n  - keep: &window [{sink: 4}, {recent: 64}]\n  - {layers: 3, keep: *window}",
        "rules:\n  - keep: [{sink: 4}, {recent: 64}]",
    ),
    "KV010": Code(
        "tag or directive",
        "The text uses a YAML tag such as `!!int`, or a directive such as `%YAML`.",
        "Every field has one type, so there is nothing for a tag to say.",
        "- {recent: !!int 64}",
        "- {recent: 64}",
    ),
    "KV011": Code(
        "nested too deep",
        "Collections are nested more than 32 deep.",
        "No policy needs more than about ten; deeper text comes from a mistake or an attack.",
        "keep: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
        "keep: [{sink: 4}]",
    ),
    # ---- shape ---------------------------------------------------------------------------------------------
    "KV020": Code(
        "unknown field",
        "A mapping has a key that its node does not know.",
        "A misspelt field that was ignored would silently change what the model remembers.",
        "- {layer: 0..3, keep: all}",
        "- {layers: 0..3, keep: all}",
    ),
    "KV021": Code(
        "a field is missing",
        "A node lacks a field that has no default.",
        "There is no value that would be right for everybody.",
        "- {layers: 0..3}",
        "- {layers: 0..3, keep: all}",
    ),
    "KV022": Code(
        "a value of the wrong kind",
        "A field holds text where it needs a number, a list where it needs"
        " a mapping, and the like. Quoted numbers are"
        " text; unquoted `1.0` is a number.",
        "Guessing a conversion would hide mistakes.",
        'version: 1.0\ncontext: "2048"',
        'version: "1.0"\ncontext: 2048',
    ),
    "KV023": Code(
        "a value is out of range",
        "A number or the length of a list lies outside what the field allows.",
        "The bounds are stated in the help line; beyond them the field has no meaning.",
        "- {recent: 0}",
        "- {recent: 1}",
    ),
    "KV024": Code(
        "a field is given twice",
        "The same key stands twice in one mapping.",
        "Which of the two counts would depend on the reader.",
        "- {layers: 0..3, keep: all, layers: 5}",
        "- {layers: [0..3, 5], keep: all}",
    ),
    "KV025": Code(
        "unknown term",
        "A word in the place of a term, score or other alternative is none of those that the language has.",
        "An unknown term cannot be skipped: it says which rows stay.",
        "keep: [{sinks: 4}]",
        "keep: [{sink: 4}]",
    ),
    "KV026": Code(
        "not one of the choices",
        "A field takes one of a few words, and got another.",
        "The help line lists the words.",
        "phase: generate",
        "phase: decode",
    ),
    "KV027": Code(
        "malformed index range",
        "Layers and heads are selected by an index (`7`), a range with both ends included (`0..3`), or a"
        " list of these.",
        "`0-3`, `0:4` and `range(4)` mean different things to different readers.",
        "layers: 0-3",
        "layers: 0..3",
    ),
    "KV028": Code(
        "a value is missing",
        "A field is followed by nothing, or by null.",
        "To take the default, leave the whole field out; an empty value is more often an unfinished line.",
        "layers:\nkeep: all",
        "keep: all",
    ),
    "KV029": Code(
        "several terms in one pair of braces",
        "A term is a mapping with one key, its name. This mapping has several.",
        "Which terms are joined must be visible: they are a list.",
        "keep: {sink: 4, recent: 64}",
        "keep: [{sink: 4}, {recent: 64}]",
    ),
    "KV030": Code(
        "text that cannot be used",
        "A text is too long, too short, spans lines, or holds characters that cannot be printed.",
        "Names appear in logs, metrics and file names.",
        'name: "a\\nb"',
        "name: a-b",
    ),
    "KV031": Code(
        "malformed number",
        "A number is not written in plain decimal digits.",
        "`010`, `1_000`, `0x10` and `1k` are read differently by different tools.",
        "- {recent: 1k}",
        "- {recent: 1024}",
    ),
    "KV032": Code(
        "a key that is not a name",
        "A list or a mapping stands where a field name should be.",
        "Only names are keys.",
        "? [layers, heads]\n: 3",
        "layers: 3\nheads: 3",
    ),
    "KV033": Code(
        "`preset` beside `keep`",
        "A rule gives both a preset and terms.",
        "A preset is a name for terms; which of the two counts would be a guess."
        " Other fields beside a preset win over it.",
        "- {preset: snapkv, keep: all}",
        "- {preset: {snapkv: {tokens: 512}}, layers: 4..31}",
    ),
}
