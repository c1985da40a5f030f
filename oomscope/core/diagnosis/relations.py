# ruff: noqa: E501  # one relation a line
"""What a description relates: who keeps, reads or shows what, and where.

The single words of `words` name a thing; a relation says what is done with it. "The losses are appended" and "a list of
non-detached outputs" are the same statement, that something with its graph outlives its step, and here both are
put together from the same parts: verbs of keeping, things that a step makes, places that last.
"""

from __future__ import annotations

import re
from functools import lru_cache

_GAP = r"(?:[^.;\n]|\.(?=\w)){0,40}?"
"""Between two parts of one statement: the same sentence, a few words."""
_KEEP = (
    r"(?:append\w*|stor(?:e|es|ed|ing)|keep(?:s|ing)?|kept|collect\w*|cach(?:e|es|ed|ing)|gather\w*|accumulat\w+|"
    r"concatenat\w+|stack(?:s|ed|ing)|extend(?:s|ed|ing)?|sav(?:es|ed) in|h[eo]ld(?:s|ing)?|retain\w*|add(?:s|ed|ing)? to)"
)
_LASTING = (
    r"(?:lists?|dict\w*|buffers?|queues?|deques?|memory bank|histor(?:y|ies)|attributes?|globals?|self\.\w+)"
)
_RESULT = r"(?:outputs?|predictions?|preds|logits|features?|embeddings?|activations?|results?|metrics?|scores?|hidden states?)"
_NO = r"(?:no|not|never|without|non-?|un|isn't|aren't|don't|doesn't|forgot\w*(?: to)?|missing)"
_TOGETHER = r"(?:each|every|all)(?: (?:of|the)){0,2}(?: \d+)?"
_PROCESS = r"(?:ranks?|process(?:es)?|workers?|GPU process(?:es)?)"
_SIZE = r"(?<![\d.])[\d.]{1,9} ?[KMGT]i?B"
_ON_DEVICE = r"(?:GPU|cuda|device|VRAM|nvidia-smi|card)"
_TYPED = r"(?:[Ll]ist|[Dd]ict|[Tt]uple)\[(?:dict|str|list|tuple|Path|[A-Z]\w+)\b"

#: (name of a signal, what is related, its sentence). Evidence of the same weight as that of single words.
_RELATIONS: tuple[tuple[str, str, str], ...] = (
    ("says:keeps_graph", rf"\b{_NO}[ -]?detached (?:\w+ ){{0,2}}(?:tensors?|loss\w*|{_RESULT})|\b(?:loss\w*|tensors?|{_RESULT})\b{_GAP}\b(?:are|is|was|were) (?:never|not) detached", "tensors are kept without detach"),
    ("says:keeps_graph", rf"\b{_KEEP}\b{_GAP}\blosses\b|\blist of (?:the )?loss\w*|\blosses\b{_GAP}\b(?:in|to) an? {_LASTING}\b", "losses are kept as tensors"),
    ("says:keeps_graph", rf"\b(?:backward|grad(?:ient)?s?)\b{_GAP}through (?:all|every|the) (?:previous|earlier|past) (?:steps?|iterations?|batches)|graph (?:\w+ ){{0,3}}(?:grows|gets longer|is never freed)", "the graph reaches back over earlier steps"),
    ("says:keeps_outputs", r"\.(?:append|extend|add)\(\s*[\w.\[\]]{1,60}(?:\.detach\(\)|\.clone\(\)){1,2}\s*\)|\.(?:append|extend|add)\(\s*(?!\w*loss)[\w.\[\]]{1,60}\s*\)[^.;]{0,25}\b(?:each|every|per) (?:\w+ )?(?:step|iter|batch|update|epoch)", "results are appended to something that lasts"),
    ("says:keeps_outputs", rf"\b{_KEEP}\b{_GAP}\b{_RESULT}\b{_GAP}\b(?:in|into|on|to) (?:an? |the |one )?(?:python )?(?:{_LASTING}|{_ON_DEVICE})\b|\b{_RESULT}\b{_GAP}\b(?:are|is|get|gets) {_KEEP}\b{_GAP}\b(?:in|into|on|to) (?:an? |the |one )?(?:{_LASTING}|{_ON_DEVICE})\b", "results of every step are kept"),
    ("phase:eval", r"\b(?:predict(?:ion|ing)?|test|inference|scoring) loop\b", "it happens in evaluation"),
    ("says:no_nograd", r"\b(?:but|and|yet) (?:not|no|never|without|forgets?|lacks?)\b[^;]{0,15}\b(?:no_grad|inference_mode)|(?:no_grad|inference_mode)\S* (?:is|was) (?:missing|not used|never used|absent)|(?:fixed|solved|cured) (?:by|with) (?:adding )?(?:\w+ )?\S*(?:no_grad|inference_mode)", "no torch.no_grad() in evaluation"),
    ("says:python_objects", rf"\b(?:data\w*|annotations?|samples?|infos?|index|records?)\b{_GAP}\b{_TYPED}|\b{_TYPED}{_GAP}\b(?:entries|samples|records|\d+ ?[Mk]\b)|\bpandas DataFrame of (?:strings|objects)|\b(?:python )?objects? (?:per|for each) sample|\bcopied (?:in|into|by) (?:each|every|all) workers?", "the data set is made of Python objects"),
    ("uses:ranks", rf"\b{_TOGETHER} {_PROCESS}\b|\bper[ -](?:process|rank)\b", "several processes"),
    ("phase:load", rf"\b{_TOGETHER} (?:{_PROCESS}|GPUs?) (?:\w+ )?(?:loads?|reads?|holds?|deseriali[sz]es?|materiali[sz]es?|opens?)\b{_GAP}(?:checkpoint|weights|model|state|{_SIZE})", "it happens while weights are loaded"),
    ("says:host", rf"\b(?:into|in|of|on) (?:the )?(?:RAM|host(?: memory)?|CPU memory|system memory)\b|\bnode (?:with|has|of) {_SIZE}", "host memory is meant"),
    ("says:retry", r"\bafter (?:the|an?|one|its) (?:first |caught |earlier )?OOM\b[^.;]{0,30}\b(?:even|also|still|every|any|all)\b|\b(?:even|also) (?:a )?(?:smaller|tiny|batch(?: size)? (?:of )?1)\b[^.;]{0,25}\bafter (?:the|an?|one) OOM", "what fits by itself fails after an error was caught"),
    ("uses:cuda_graph", r"\bgraph captur\w+|\bcaptur\w+ (?:the |a |of )?(?:\w+ )?graphs?\b", "uses CUDA graphs"),
    ("says:private_pool", r"\bprivate pools?\b", "memory lies in private pools"),
    ("uses:hooks", r"\bregister_\w*hook\w*|\b(?:forward|backward|state_dict|post|pre)_hook\b", "hooks of a library are involved"),
    ("says:recompiles", r"\brecompil\w+|\bcompile[ds]? (?:again|anew|for each|per) (?:\w+ )?shape", "the compiled program is looked at"),
    ("uses:compile", r"\brecompil\w+", "uses torch.compile"),
    ("says:one_autocast", r"\b(?:whole|entire|all|complete)\b[^.;]{0,40}\b(?:inside|within|under|in) (?:one |a |the )?(?:single |outer )?\S*autocast|\bone (?:\S+ )?autocast (?:block|region|context)", "one autocast region spans everything"),
    ("uses:cudnn_benchmark", r"\b(?:turning|switching|setting) \S*cudnn\S*benchmark\S* (?:off|to False)\b[^.;]{0,20}\b(?:lowers?|reduces?|fixes|helps|solves|cures|cuts|halves)", "cuDNN tries algorithms"),
    ("says:versions", r"\b(?:since|after|when) (?:the )?(?:upgrad\w+|updat\w+|switching|moving) (?:from \S+ )?to (?:v|torch |pytorch )?\d+\.\d+|\bwith (?:torch |pytorch )?\d+\.\d+(?:\.\d+)? (?:the same|it|this|everything)\b[^.;]{0,20}\b(?:is |was )?(?:stable|fine|flat|ok|works)\b|\b(?:introduced|appeared|started) (?:in|with) (?:torch |pytorch |version )?\d+\.\d+|\bdowngrad\w+[^.;]{0,25}\b(?:fixes|helps|solves|fixed|solved|cures)", "it depends on a version"),
    ("says:contrast", r"\bwith (?:torch |pytorch )?\d+\.\d+(?:\.\d+)? (?:the same|it|this|everything)\b[^.;]{0,20}\b(?:is |was )?(?:stable|flat|constant)\b|\bdowngrad\w+[^.;]{0,25}\b(?:fixes|helps|solves|fixed|solved|cures) the (?:leak|growth)|\b(?:stable|flat|no leak|no growth) (?:on|in|with) (?:torch |pytorch )?\d+\.\d+", "another version does not grow"),
    ("phase:resume", r"\b(?:checkpoint|ckpt|torch\.load\([^)]*\))`?\b[^;]{0,25}\b(?:stays|remains|is kept|still|kept|never deleted|not deleted|in scope|alive)|\b(?:start\w*|train\w*|run\w*) (?:a)?fresh\b|\bfresh (?:run|start|training)\b|\bnew run\b[^.;]{0,40}\b(?:fits|works|needs less)", "it needs more after loading a checkpoint"),
    ("says:duplicate", r"\b(?:checkpoint|ckpt|torch\.load\([^)]*\))`?\b[^;]{0,25}\b(?:still referenced|in scope|never deleted|not deleted|alive)", "the loaded checkpoint stays alive"),
    ("says:on_gpu0", rf"\b{_TOGETHER} (?:\w+ )?{_PROCESS} (?:also )?(?:appears?|shows? up|is listed|has a context|sits?|runs?|takes?|uses?)\b[^.;]{{0,25}}\b(?:on|of) (?:device|GPU|cuda)[ :]?0\b", "the first GPU carries more than its share"),
    ("uses:ranks", rf"\b{_TOGETHER} (?:python )?process(?:es)?\b", "several processes"),
    ("says:invisible_process", r"\b(?:notebook|jupyter|ipython|another|other|old|second) (?:\w+ )?kernel\b|\b(?:notebook|earlier run|old run|previous run|last run)\b[^.;]{0,30}\b(?:still|holds?|alive|running)", "another process holds the memory"),
    ("says:packing_helps", r"(?:max_split_size(?:_mb)?|expandable[_ ]segments)\S*\s+(?:makes?|let|lets)\b[^.;]{0,25}\b(?:go away|disappear|vanish|fit|run|pass)|(?:no (?:more )?(?:OOM|error)s?|goes away|disappears) (?:with|under|once) \S*(?:max_split_size|expandable[_ ]segments)", "an allocator setting cures it"),
    ("says:keeps_graph", r"\b(\w*loss\w*) = \1 \+ \w*(?:loss|l)\w*\b(?!\.(?:item|detach))|\b(?:state|hidden|memory|h_n|carry)\b[^.;]{0,30}\b(?:of|from) (?:the )?(?:last|previous|earlier) (?:batch|step|iteration|chunk)\b[^.;]{0,20}\b(?:passed|fed|given|carried|used)|\bcarried over\b[^.;]{0,20}\b(?:batches|steps|iterations)", "tensors with their graph are kept"),
    ("says:python_objects", r"\b(?:million|\d[\d.,]*[Mkm]?) (?:file ?)?(?:names|paths|strings|captions|sentences|urls|records|entries)\b[^.;]{0,25}\b(?:as|of) (?:python )?(?:strings|objects|dicts?|lists?|tuples)", "the data set is a Python list"),
    ("says:no_nograd", r"\b(?:forgot\w*|lacks?|misses|missing)\b[^;]{0,20}\b(?:no_grad|inference_mode)", "no torch.no_grad() in evaluation"),
    ("says:first", r"\bthe (?:very )?first (?:optimi[sz]er(?:\.| |'s )step|update|step\(\))", "it fails at the start"),
    ("says:one_unit", r"\b(?:fully_shard|FSDP|wrap\w*)\b[^;]{0,40}\b(?:root only|only (?:on |for )?the root|the root alone|whole model only)\b", "one sharding unit holds the whole model, or units stay gathered"),
    ("says:no_sync", r"\brequires?_(?:backward_)?grad(?:ient)?_sync\s*(?:=|is)\s*False", "gradients are accumulated without synchronisation"),
    ("says:buckets", r"\bDDP\b[^.;]{0,25}\b(?:adds?|costs?|takes?|needs?|holds?)\b[^.;]{0,25}\b(?:size|copy|amount) of (?:all |the )*gradients", "DDP's buckets are involved"),
    ("says:longest", r"\bone (?:document|sample|sequence|example|image|video|graph|clip|utterance) (?:of|with) \d[^.;]{0,40}\b(?:among|others?|rest|average|usual\w*|most)\b|\b(?:dies|fails|OOMs?) (?:at|on|with|for) (?:that|the (?:longest|largest|biggest))\b", "the largest batch is suspected"),
    ("says:rate", r"(?<![\d.])[\d.]{1,12} ?[KMG]i?B (?:per|each|every) (?:call|forward|request|image|sample|file|invocation|generation)", "a rate of growth is known"),
    ("says:growing", r"(?<![\d.])[\d.]{1,12} ?[KMG]i?B (?:per|each|every) (?:call|forward|request|image|file|invocation|generation)", "memory grows"),
    ("says:contrast", r"\b(?:none|nothing|no growth|not) (?:with|on|in|under) (?:torch |pytorch )?\d+\.\d+", "another version does not grow"),
    ("says:versions", r"\b(?:none|nothing|no growth|not) (?:with|on|in|under) (?:torch |pytorch )?\d+\.\d+", "it depends on a version"),
    ("says:plateau", r"\bthen (?:it )?(?:is |remains |stays )?(?:constant|flat|steady|stable)\b", "it rises and then stays"),
    ("says:keeps_outputs", r"\breset(?:\(\))? (?:is|are|was|were) never\b|\bnever (?:calls? )?reset\b", "results pile up"),
    ("says:spurious", r"\b(?:again|twice|once more|a second time)\b[^.;]{0,30}\b(?:after the (?:error|OOM|exception))\b[^.;]{0,10}\b(?:works|passes|succeeds|is fine)", "the same request succeeds on retry"),
    ("uses:ranks", r"\b[2-9]\d? (?:PIDs|contexts)\b|\b(?:one|a) PID (?:on|per)", "several processes"),
    ("uses:dataparallel", r"\b(?:all|the|model) replicas\b[^.;]{0,30}\bgathered\b|\bgathered\b[^.;]{0,20}\b(?:of|from) (?:all |the )?replicas", "outputs of replicas are gathered"),
    ("says:keeps_graph", r"\b(?:together with|including|with) (?:their|its|the) (?:autograd )?(?:history|graphs?)\b|\b(?:summed|accumulated|added up|kept|logged|averaged) as (?:a )?(?:\w+ )?tensors?\b", "tensors are kept with their graph"),
    ("says:python_objects", r"\b(?:samples?|data\w*|index|annotations?|records?)\b[^.;]{0,25}\b(?:in|as|is) (?:a |one )?(?:big |huge |large |pure )?(?:python )(?:dict\w*|lists?|objects?)", "the data set is a Python list or dictionary"),
    ("uses:cuda_graph", r"\brecords? (?:a |another )?(?:new )?graph (?:per|for|each|every)", "uses CUDA graphs"),
    ("says:private_pool", r"\brecords? (?:a |another )?(?:new )?graph (?:per|for|each|every)", "each shape records a graph, with a pool of its own"),
    ("says:keeps_outputs", rf"\b{_LASTING}\b[^.;]{{0,15}}\b(?:holds?|has|contains?|gets?) (?:a|one|the) (?:\w+ ){{0,2}}(?:tensors?|{_RESULT}) (?:per|for each|for every|of each|of every) (?:batch|step|iteration|sample)", "results of every step are kept"),
    ("phase:eval", r"\beval_(?!accumulation)\w+\b(?!\s*=\s*False)", "it happens in evaluation"),
    ("says:no_nograd", r"\b(?:evaluat\w+|validat\w+|inference|test\w*)\b[^.;]{0,25}\b(?:builds?|records?|creates?|keeps?) (?:an? |the )?(?:autograd |computation )?graphs?\b", "evaluation records gradients"),
    ("phase:optimizer", r"\b(?:first|second|every|each) optimi[sz]er(?:\.| )step\b|\bweight update\b", "it happens in the optimizer step"),
    ("says:first", r"\b(?:the|before the|until the) (?:very )?first optimi[sz]er(?:\.| )step", "it fails at the start"),
    ("says:foreach", r"\b_?foreach_\w+", "multi-tensor optimizer kernels"),
    ("says:retry", r"\btraceback\b[^.;]{0,50}\b(?:keeps?|holds?|references?)\b", "a caught error's traceback keeps its frames"),
    ("says:whole_model", r"\.(?:cuda|to)\([^)]{0,30}\)[^.]{0,20}(?:FSDP|fully_shard)\(", "the whole model is made before it is sharded"),
    ("phase:init", r"\.(?:cuda|to)\([^)]{0,30}\)[^.]{0,20}(?:FSDP|fully_shard)\(", "the whole model is made before it is sharded"),
    ("says:no_effect", r"\b(?:peak|memory|usage|footprint)\b[^.;]{0,10}\b(?:is|stays|remains) (?:exactly |about |nearly )?(?:the )?(?:same|unchanged|identical)\b", "a fix changed nothing"),
    ("says:allowed", r"\bmemory[_ ]fraction (?:is|=|of|set to) 0?\.\d", "a limit on this process is set"),
    ("uses:scheduler", r"\bdocker run (?:\S+ )?(?:-m|--memory)[ =]?\d+|\bcontainer\b[^.;]{0,20}\bkilled\b", "a scheduler or container limits memory"),
    ("says:host", rf"\b(?:process|job|container|worker|run|training|it|gets?|is|was) (?:is |was |gets )?killed\b(?! by (?:me|us|hand))|\bkilled (?:before|after|during|with|by the (?:kernel|system|OS))\b|{_SIZE} (?:node|host|machine)\b", "host memory is meant"),
    ("op:init_state", r"\ballocat\w+ (?:the )?(?:exp_avg\w*|momentum(?:_buffer)?|optimi[sz]er states?)\b|\b(?:exp_avg\w*|momentum_buffer)\b[^.;]{0,20}\b(?:allocated|made|created|zeros)", "the optimizer makes its state"),
    ("phase:optimizer", r"\ballocat\w+ (?:the )?(?:exp_avg\w*|momentum(?:_buffer)?)\b", "it happens in the optimizer step"),
)  # fmt: skip
_MORE_THAN_CONTEXT = 0.95
"""GiB: a CUDA context with its libraries takes less on public reports (0.3 to 0.9); what is larger holds tensors."""
_BARE_CONTEXT = 0.6
"""GiB: a context that another rank left behind has no library in it, and takes less on most systems; between this and
`_MORE_THAN_CONTEXT` it may be either."""
_EACH = re.compile(
    r"(?:each|apiece|every one)\b[^.;\d]{0,35}(?P<a>[\d.]{1,9}) ?(?P<ua>[MG])i?B|(?P<b>[\d.]{1,9}) ?(?P<ub>[MG])i?B (?:of memory )?(?:each|apiece|of every|per (?:process|rank))",
    re.IGNORECASE,
)
_COUNTED = r"(?:lengths?|tokens?|frames?|points?|nodes?|boxes|sizes?|samples?)"
_RANGE = re.compile(
    rf"\b{_COUNTED}\b[^.;]{{0,25}}?\b(?:from|between) (?P<a>\d{{1,7}}) (?:to|and) (?P<b>\d{{1,7}})\b"
    rf"|\b(?:from|between) (?P<c>\d{{1,7}}) (?:to|and) (?P<d>\d{{1,7}}) {_COUNTED}\b",
    re.IGNORECASE,
)
_WIDE = 4
"""Inputs whose largest is this many times the smallest are of different sizes for memory's purpose (assumed)."""
_PER_PROCESS = re.compile(rf"{_SIZE} (?:RAM |of RAM )?per (?:process|rank|worker)\b", re.IGNORECASE)


@lru_cache(maxsize=1)
def _compiled() -> tuple[tuple[str, re.Pattern[str], str], ...]:
    return tuple((name, re.compile(p, re.IGNORECASE), text) for name, p, text in _RELATIONS)


def from_relations(text: str) -> tuple[tuple[str, str, re.Match[str]], ...]:
    """(name of a signal, its sentence, where it stands) for each relation that `text` states."""
    found = [
        (name, sentence, match)
        for name, pattern, sentence in _compiled()
        if (match := pattern.search(text)) is not None
    ]
    each = _EACH.search(text)
    if each is not None and _gib(each) >= _MORE_THAN_CONTEXT:
        found.append(("says:more_than_context", "more than a context each", each))
    elif each is not None and _gib(each) >= _BARE_CONTEXT:
        found.append(
            ("says:large_context", "as much as a large context, or a small one with tensors, each", each)
        )
    wide = _RANGE.search(text)
    if wide is not None and int(wide["b"] or wide["d"]) >= _WIDE * max(1, int(wide["a"] or wide["c"])):
        found.append(("says:varied_inputs", "inputs differ in size", wide))
        found.append(("says:wide_range", "the largest input is many times the smallest", wide))
    own = _PER_PROCESS.search(text)
    if own is not None and re.search(_ON_DEVICE, text, re.IGNORECASE) is None:
        # A card's memory is counted per GPU; who counts per process means the machine's.
        found.append(("says:host_each", "host memory is counted for each process", own))
    return tuple(found)


def _gib(match: re.Match[str]) -> float:
    number, unit = (match["a"], match["ua"]) if match["a"] else (match["b"], match["ub"])
    try:
        value = float(number)
    except ValueError:
        return 0.0
    return value if unit.upper() == "G" else value / 1024


__all__ = ["from_relations"]
