# ruff: noqa: E501  # one pattern a line
"""Observations read from what a person writes about a failure, in their own words.

An issue or a chat message often says what no error text does: "after the first epoch", "only when resuming",
"with FSDP", "keeps growing". Such words are weak evidence: they carry a strength below that of anything
measured, and rules never reach full confidence on them alone.
"""

from __future__ import annotations

import re
from functools import lru_cache

from oomscope.core.diagnosis.evidence import Signal
from oomscope.core.diagnosis.figures import from_figures
from oomscope.core.diagnosis.relations import from_relations

STRENGTH = 0.6

_CURES = (
    r"(?:fixes|fixed|helps|helped|solves|solved|is missing|was missing|(?:is |was )?not (?:set|given|passed))"
)
_MAP = (
    r"(?:without|missing|no|forgot\w*|fixed by|fixed with|solved by|solved with|after adding|lacks?) (?:a |the )?map_location"
    rf"|map_location\S* {_CURES}\b"
)
"""A checkpoint's place matters where map_location is missed or cures; that it is given says nothing."""

#: name, pattern, what it says. Several patterns may give one name.
_WORDS: tuple[tuple[str, str, str], ...] = (
    # -- course over time
    ("says:growing", r"(?<!\bno )(?<!\bnot )(?<!without )(?<!\btry )(?<!\bconsider )\b(?:grow(?:s|ing|th)?|grew|climb(?:s|ing)?|leak(?:s|ing|age)?|accumulat\w+|ramps?|rises?|increas(?:es|ing)|go(?:es|ing)? up|creep\w*|builds? up)\b(?! by the data)", "memory grows"),
    ("says:growing", r"\buntil (?:it )?(?:OOM|overflow|out of memory|crash\w*)|\bafter (?:a while|some time|~?\d+ (?:iter|step|batch)\w*)|\d ?[KMGT]i?B\b(?: \w+){0,2} (?:per|each|every) (?:\w+ )?(?:iter(?:ation)?|step|batch|hour|epoch)\b", "it fails only after a while"),
    ("says:rate", r"(?<![\d.])[\d.]{1,12}\s*(?:-\s*[\d.]{1,12})?\s*[KMG]i?B\s*(?:/|per |each |every )\s*(?:\d+ )?(?:\w+ )?(?:iter|step|batch|hour|epoch|validation)|\+\s*(?<![\d.])[\d.]{1,12}\s*(?:-\s*[\d.]{1,12})?\s*[KMG]i?B at every", "a rate of growth is known"),
    ("says:plateau", r"\bplateau\w*|then (?:stops?|stays?|stabili[sz]es?|levels? off)|(?:stays?|remains?) (?:flat|constant|stable) (?:after|from)", "it rises and then stays"),
    ("says:late", r"\bafter (?:several |many |\d+ )?(?:hours|days|epochs)\b|\bstep [1-9]\d{3,}\b|\b(?:OOM|fails?|dies) late\b", "it fails late"),
    ("says:first", r"\b(?:in|at|on|during) the first (?:iteration|step|batch|forward|optimi[sz]er)|\bat (?:the )?(?:very )?(?:start|beginning)\b|\bfirst (?:iteration|forward)\b|before (?:step 1|training)", "it fails at the start"),
    ("says:not_first", r"\b(?:passe[ds]|survives?|after) (?:\w+ )?(?:\d+|two|three|four|several) (?:\w+ )?(?:steps?|updates?|iterations?|epochs?)|\b(?:at|in) iteration [1-9]\d+|\b(?:step|iteration) [2-9]\d*\b", "earlier steps passed"),
    ("says:random", r"\brandom(?:ly)?\b(?! (?:tensor|id|input|seed|init|data|crop))|\bnot (?:stable|reproducible|deterministic)\b|\bsporadic\w*", "it fails at no fixed step"),
    ("says:retry", r"\b(?:after |when )?(?:catch(?:ing)?|caught|except(?:ion)?|recover\w*)\b.{0,60}\b(?:again|second|retry|next|fails|still|following)\b|\bsecond (?:call|run|attempt) (?:fails|dies|OOMs)|\bretr(?:y|ies|ied|ying)\b|following steps", "it fails again after an error was caught"),
    ("says:retry", r"\bleaves? (?:intermediate )?tensors? allocated", "a failed step leaves memory behind"),
    ("says:start_peak", r"\bat (?:the )?start\b.{0,40}\b(?:later|steady|then|afterwards)\b", "it needs more at the start than later"),
    # -- where
    ("says:host", r"\b(?:CPU|host|system) (?:memory|RAM|OOM)\b|\bRAM\b(?! on)|\bswap\b|signal[ -]*9\b|\bSIGKILL\b|worker.{0,20}killed|\bKilled\b", "host memory is meant"),
    ("phase:save", r"\bsav(?:e|es|ing)\b(?! (?:a|the) \w+ (?:at the end|every|each|once))(?! (?:memory|nothing|any|only|\d))(?!s? nothing)|checkpoint(?:s)? (?:is|was|are) (?:written|saved)\b(?! every| each| once)|\bsave_(?:model|checkpoint|pretrained)\b|\brank0_only\b|\bstate[_ ]dict\b(?<!load_state_dict)(?! (?:is [\d.]|keys|has\b))|ModelCheckpoint|full state dict|Failed to clone\(\)|clone\(\) (?:OOM )?warnings?", "it happens while saving"),
    ("phase:resume", r"\bresum\w+|\brestor\w+|load_state_dict|load(?:s|ing|ed)? (?:the |a )?(?:optimizer|checkpoint|ckpt)|optimizer\.pt\b", "it happens while resuming or loading a checkpoint"),
    ("phase:eval", r"\bevaluat\w+|\bvalidation\b|\bvalidat(?:e|ing)\b|\beval\b|\bgenerate\(|\binference\b|\bno_grad\b", "it happens in evaluation"),
    ("phase:optimizer", r"\boptimi[sz]er\.step\b|\bAdam\w* step\b|(?:in|during|at) (?:the )?optimi[sz]er(?:'s)? step", "it happens in the optimizer step"),
    ("phase:init", r"\binit(?:iali[sz]ation)?\b(?:.{0,20}\bOOM\b)?|before step 1|_move_model_to_device|moves? (?:the )?(?:whole|full|entire) |\.shard\(\)", "it happens while the model is set up"),
    ("phase:load", r"\bfrom_pretrained\b|\bload(?:s|ing)? (?:the )?(?:model|weights|a checkpoint)|ranks? loading", "it happens while weights are loaded"),
    # -- what the job uses
    ("uses:fsdp", r"\bFSDP\d?\b|fully_shard|FullyShardedDataParallel", "uses FSDP"),
    ("uses:zero", r"\bZeRO\b|\bzero[-_ ]?[123]\b", "uses ZeRO"),
    ("uses:deepspeed", r"\bdeepspeed\b", "uses DeepSpeed"),
    ("uses:ddp", r"\bDDP\b|DistributedDataParallel|torch\.distributed\.launch|\bddp\b", "uses DDP"),
    ("uses:dataparallel", r"(?<!Distributed)(?<!distributed)\bDataParallel\b", "uses nn.DataParallel"),
    ("uses:ranks", r"\branks?\b|\btorchrun\b|\bmulti-?GPU\b|\b\d+\s*(?:procs|processes|GPUs|ranks|nodes)\b|\b[2-9]-GPU\b|\b\d{1,3}\s?x\s?(?:(?:RTX|GTX|Tesla|NVIDIA) ?)?(?:[AHBVPLTK]\d+\w*|MI\d+\w*|(?:10|16|20|30|40|50)\d0\w*|\d{2,3} ?Gi?B)\b|\b\w*\d[MB]\s+x\s+\d{1,2}\b|\blocal_rank\b|\bset_device\b|torch\.distributed\.launch|\bevery process\b|\bDDP\b", "several processes"),
    ("uses:autocast", r"\bautocast\b|\bAMP\b|--amp\b|mixed precision", "uses autocast"),
    ("uses:checkpointing", r"(?:gradient|activation|reentrant|non-reentrant|native) checkpoint\w*|checkpoint_wrapper|checkpointing", "uses activation checkpointing"),
    ("uses:expandable", r"expandable[_ ]segments|max_split_size", "allocator settings are in use"),
    ("uses:varlen_attention", r"flash_attn_varlen|varlen_func", "uses flash_attn_varlen_func"),
    ("uses:compile", r"\btorch\.compile\b|\bwith compile\b|\binductor\b|\bdynamo\b", "uses torch.compile"),
    ("uses:cuda_graph", r"CUDA[ -]?graphs?\b|reduce-overhead|max-autotune|private pools", "uses CUDA graphs"),
    ("uses:mem_pool", r"use_mem_pool|\bMemPool\b|memory pool of its own", "uses a memory pool of its own"),
    ("uses:cudnn_benchmark", r"(?:falls|drops|fixed|solved|lower|goes away)\b.{0,30}cudnn[. ]benchmark\s*=\s*False|cudnn[. ]benchmark\s*=\s*False (?:fixes|helps|solves)|cudnn[. ]benchmark(?!\s*(?:=|is)?\s*(?:False|off))(?!.{0,25}(?:no help|not help|n't help|no effect|did nothing|changes? nothing|no difference|already))", "cuDNN tries algorithms"),
    ("uses:offload", r"\boffload\w*|ZeRO-?infinity|\bpin_memory\b|\bpinned\b", "state is offloaded to the host"),
    ("uses:workers", r"\bworkers?\b|num_workers|\bDataLoader\b", "uses loader workers"),
    ("uses:hooks", r"\b(?:forward |backward )?hooks?\b|\bOpacus\b|\bcallback\b", "hooks of a library are involved"),
    ("uses:dynamic_shapes", r"dynamic (?:batching|shapes?)|shapes? (?:change|changes|changing|differ|printed)", "shapes change"),
    ("uses:wsl", r"\bWSL2?\b", "runs under WSL"),
    ("uses:windows", r"\bWindows\b|\bWDDM\b|paging file|pagefile", "runs on Windows"),
    ("uses:mig", r"\bMIG\b|\bMPS server\b", "runs on a slice of the device"),
    ("uses:scheduler", r"\bSLURM\b|\bKubernetes\b|\bk8s\b|\bcgroup\w*|\bper cpu\b|\bdocker\b|--mem\b", "a scheduler or container limits memory"),
    # -- patterns in the program
    ("says:keeps_graph", r"(?:retain|create)_graph(?!\s*=\s*False)|\bgrad_fn\b|graph (?:of|from) every|(?:accumulat|sum|logg?|stor|append|keep|add)\w*\s+(?:a |the |each |all )?(?:\w+ )?loss(?:es)?(?: tensors?)?\b|loss(?:es)? (?:with|carry)|state fed back|recurrent state", "tensors with their graph are kept"),
    ("says:keeps_outputs", r"(?:keeps?|kept|stor\w+|retain\w*|collect\w*) (?:all |each |every )?(?:step'?s? |the )?(?:outputs?|results?|predictions?|on (?:the )?GPU|for )|\bkept on GPU\b|outputs? (?:are |is )?kept|\bretained\b|tensors? per \w+ kept|detached but kept", "results of every step are kept"),
    ("says:cycle", r"self[- ]reference|reference cycle|circular|(?:\bgarbage\b|\bgc\b(?!\.freeze| is (?:disabled|off|enabled|on)\b))(?!.{0,25}(?:no help|not help|n't help|no effect|did nothing|changes? nothing|no difference|already))", "reference cycles are involved"),
    ("says:no_nograd", r"(?:without|no|missing|forgot) (?:torch\.)?(?:no_grad|inference_mode)", "no torch.no_grad() in evaluation"),
    ("says:cast_cache", r"cache_enabled|cached? (?:weight )?casts?", "autocast's cache is involved"),
    ("says:foreach", r"\bforeach\b|multi[-_ ]tensor", "multi-tensor optimizer kernels"),
    ("says:optimizer_kernel", r"\bfused\s*=|\bAdamW? step \d", "it happens in the arithmetic of the optimizer"),
    ("says:logits", r"\blogits?\b(?! (?:are|is|were|was) (?:float16|fp16|bf16|bfloat16|half|small|chunked|moved|kept|on))|\[B,\s*S,\s*V\]|(?:large|big|huge|\d{6}|[12]\d\dk)\W{0,3}(?:tokens? )?vocab\w*|vocab\w*(?: size)?\W{0,3}(?:of )?(?:\d{6}|[12]\d\dk)\b|\bin (?:F\.)?cross[- _]?entropy|(?:fp32|float32|full|unfused|non-fused)[- ]cross[- _]?entropy", "the logits are involved"),
    ("says:giant", r"one (?:temporary|tensor) the size|materiali[sz]es?\b|size of all gradients", "one tensor is as large as the model's gradients or logits"),
    ("says:no_sync", r"no_sync|set_requires_gradient_sync|gradient accumulation with|when accumulating", "gradients are accumulated without synchronisation"),
    ("says:buckets", r"gradient_as_bucket_view(?!\s*=\s*True (?:is|was|already|set))|\bbuckets?\b(?! by| of [\d.]+ ?MB)", "DDP's buckets are involved"),
    ("says:duplicate", r"\bneeds? 2x|\btwice\b|\b2x model\b|\bscratch (?:fits|ok|training fits)|from scratch", "it fits from scratch, or state exists twice"),
    ("says:varied_inputs", r"vari(?:able|ed|ous|ying) (?:\w+ )?(?:lengths|sizes|shapes)|vari(?:able|ed|able-length)[ -]?(?:inputs?|length|size)|sorted (?:loader|batches|by)|short batches|sequence length (?:varies|differs)|different lengths", "inputs differ in length"),
    ("says:longest", r"longest (?:sample|batch|sequence)|largest batch", "the largest batch is suspected"),
    ("says:low_share_allocated", r"reserved.{0,40}although allocated|allocated is (?:only )?\d|reserved\D{0,12}[\d.]+.{0,20}(?:vs|while|but) allocated", "reserved memory is far above allocated"),
    ("says:reserved_stays", r"reserved stays|reserved (?:remains|does not (?:fall|drop))|allocated (?:halves|falls|drops).{0,30}reserved", "reserved memory stays high while allocated falls"),
    ("says:record_stream", r"record_?stream|AVOID_RECORD_STREAMS", "blocks are recorded on another stream"),
    ("says:on_gpu0", r"\bon (?:GPU|cuda|device)[ :]?0\b|\bcuda:0\b|\bfirst GPU\b|\brank[- ]?0 GPU|onto GPU 0|\bGPU 0 (?:is|has|shows|lists|holds|carries)", "the first GPU carries more than its share"),
    ("says:gpu0_heavy", r"GPU ?0 [\d/ ]+.{0,30}(?:less|fewer) on GPU ?1|same max batch with 1 or \d GPUs", "the first GPU is much fuller than the others"),
    ("says:only_multi", r"only (?:in|with|on) (?:multi|\d+ GPUs|several)", "only with several GPUs"),
    ("says:no_effect", r"saves? nothing|does not (?:reduce|lower|help|change)|(?:uses|needs) (?:the )?(?:same|as much|slightly more|more) memory|no (?:effect|help|difference)|although it is on|as much memory as|same memory as", "a fix changed nothing"),
    ("says:invisible_process", r"no visible process|\b0 processes\b|no process(?:es)? (?:shown|listed|visible)|outside torch|used by (?:someone|another)", "memory is held by nobody that can be seen"),
    ("says:nccl_oom", r"NCCL\b.{0,40}\b(?:OOM\b|out of memory|error.{0,20}memory)", "NCCL found no memory"),
    ("says:masked", r"NVML_SUCCESS|INTERNAL ASSERT", "an internal assertion stands where the message should be"),
    ("says:library_init", r"CUBLAS_STATUS_(?:NOT_INITIALIZED|ALLOC_FAILED)|cublasCreate|CUDNN_STATUS_\w+", "a library handle could not be made"),
    ("says:more_gpus_help", r"solved with more GPUs|fits? (?:on|with) (?:more|larger|bigger)", "more memory cures it"),
    ("says:allowed", r"\bGiB allowed\b|memory_fraction", "a limit on this process is set"),
    ("says:python_objects", r"(?:pure-?Python )?(?:list|dict\w*) of (?:\d\w* )?(?:custom )?(?:\w+ )?(?:objects?|strings?|items?)|copy[- ]on[- ](?:write|access)", "the data set is a Python list or dictionary"),
    ("says:per_epoch", r"per epoch|within one epoch|each epoch|every epoch", "it grows within an epoch"),
    ("says:versions", r"\b(?:torch|pytorch|on torch|version)\s*\d+\.\d+|upgrade [\d.]+ ?->|\bregression\b|\bon \d+\.\d+(?:\.\d+)?\b.{0,12}\b(?:fine|ok|none|no leak|not)\b (?:on|in|with) \d+\.\d+", "it depends on a version"),
    ("says:objects", r"#? ?of tensors|\w+ objects accumulate|number of (?:tensors|objects)", "the number of objects grows"),
    ("says:only_system", r"\b(?:Ubuntu|Linux|Windows|macOS) only\b|only on (?:Ubuntu|Linux|Windows|macOS|A100|V100)", "only some systems show it"),
    ("says:fails", r"\bOOM\b|out of memory|fails?\b|dies\b", "it fails"),
    # -- other ways to say it
    ("says:second", r"\bsecond (?:iteration|step|forward|batch)\b|\biteration (?:2|two|1)\b|first (?:iteration|step|forward)(?: pass)? (?:passes|works|succeeds|fits|is fine|ok)", "the first iteration passes and the second fails"),
    ("says:retry", r"(?:not|never) (?:freed|released) (?:after|when|once).{0,40}(?:exception|OOM|error|catch)|after (?:an? |the )?(?:caught )?OOM.{0,50}(?:not (?:freed|released)|still (?:full|allocated|held)|remains)", "memory stays after a caught error"),
    ("says:keeps_graph", r"(?:missing|without|no|not|forgot\w*|needs?|fixed by|add(?:ed|ing)?) (?:a |the |calling )?\.?detach|instead of loss\.item|hidden states?(?! (?:is |was |are |were )?(?:detached|reset))", "tensors are kept without detach"),
    ("says:keeps_outputs", r"metrics?.{0,40}(?:never|not|without) reset|list states?|replay buffer|(?:concatenat|gather|accumulat)\w+ (?:all )?(?:logits|predictions|outputs)|(?:logits|predictions) (?:of all|are (?:gathered|kept|stored))|eval_accumulation_steps", "results pile up"),
    ("says:no_effect", r"no (?:memory )?(?:reduction|savings?|improvement|benefit)\b|does(?:n't| not) (?:decrease|save|shrink)|(?:un|not )changed peak|same peak|grad(?:ient)?s? (?:are|is|will be) None", "a fix changed nothing"),
    ("says:record_stream", r"limit_all_gathers|rate[- ]limit(?:er|ed|ing)\b|CPU (?:runs|thread runs|runs too far) ahead", "freed blocks wait for another stream"),
    ("says:spurious", r"(?:same|identical) (?:allocation|request|call|retry) (?:succeeds|works|passes)|spurious OOM|(?:succeeds|works) (?:on|after) (?:a )?retry", "the same request succeeds on retry"),
    ("says:invisible_process", r"\bzombie\b|\borphan(?:ed)?\b|\bdefunct\b|left-?over process|(?:used|held|occupied|taken) by (?:another|other|a different|someone)", "another process holds the memory"),
    ("says:library_alloc", r"CU(?:BLAS|DNN|SOLVER|FFT)_(?:STATUS_)?ALLOC_FAILED", "a library found no memory for itself"),
    ("says:cache_helps", r"empty_cache\S*(?: \w+){0,5} (?:helps|fixes|solves|works)\b|(?:fixed|solved) (?:by|with)(?: \w+){0,2} \S*empty_cache", "giving the cache back helps"),
    ("says:shm", r"/dev/shm|shared memory(?! (?:is |of )?[\d.]+ ?[GT]i?B)|shm[-_ ]size|\b[Bb]us error", "shared memory is involved"),
    ("uses:hooks", r"\bwandb\b|\btensorboard\b|\bprofiler\b|\blogger\b", "a logger or profiler is involved"),
    # -- names that only one part of a library has
    ("uses:fsdp", r"handle\.shard\(\)|\bFlatParam\w*|\bflat_param|summon_full_params|FULL_STATE_DICT|FullStateDictConfig|sync_module_states|\bFULL_SHARD\b|SHARD_GRAD_OP|cpu_ram_efficient_loading", "uses FSDP"),
    ("uses:deepspeed", r"gather_16bit_weights|save_16bit_model|offload_optimizer|DeepSpeedCPUAdam|\bds_config\b", "uses DeepSpeed"),
    ("uses:checkpointing", r"checkpoint\w* (?:wraps|around|over) (?:the )?(?:whole|entire)|use_reentrant|\b(?:non-)?reentrant\b|None of the inputs have requires_grad", "uses activation checkpointing"),
    ("uses:offload", r"cpu_offload|DeepSpeedCPUAdam|\bcpu[_ ]adam\b", "state is offloaded to the host"),
    ("uses:cuda_graph", r"cudagraph\w*|cuda_graph\w*", "uses CUDA graphs"),
    ("uses:scheduler", r"OOMKilled|memory\.max\b|memory\.limit_in_bytes|\b(?:k8s |kubernetes )?(?<!TPU )pods? (?:was |is |gets? |has been )?(?:killed|evicted|limit|memory)|mem-per-cpu|(?:container|pod|job)(?:'s)? (?:memory )?limit", "a scheduler or container limits memory"),
    ("phase:save", r"FULL_STATE_DICT|(?<!load_)(?<!set_)full_state_dict|FullStateDictConfig|summon_full_params|gather_16bit_weights|save_16bit_model|\bget_(?:model_)?state_dict", "it happens while saving"),
    ("phase:resume", r"from scratch\b.{0,20}\b(?:fits|works|is (?:ok|fine))|\b(?:fits|spare|works|fine|ok)\b.{0,12}\bfrom scratch|\bscratch (?:training )?(?:fits|works|is ok|is fine|ok)\b|\bassign=True", "training from scratch fits, which points to loading a checkpoint"),
    ("phase:resume", _MAP, "where a checkpoint is loaded to matters"),
    ("phase:load", r"low_cpu_mem_usage", "it happens while weights are loaded"),
    ("phase:eval", r"eval_accumulation_steps|validation_(?:step|epoch_end)|\bcompute_metrics\b", "it happens in evaluation"),
    ("phase:optimizer", r"\b_init_group\b|zeros_like\(p\b", "it happens in the optimizer step"),
    ("op:init_state", r"\b_init_group\b|\bexp_avg\w* (?:is|are|was|gets?) (?:created|allocated|made)|zeros_like\(p\b|(?:optimi[sz]er|Adam\w*)(?:'s)? state (?:is |was |gets )?(?:created|allocated|made|initiali[sz]ed)", "the optimizer makes its state"),
    ("says:map_location", _MAP, "where a checkpoint is loaded to matters"),
    ("says:whole_model", r"_move_model_to_device|mov(?:es?|ing) (?:the )?(?:whole|full|entire) (?:\S+ )?(?:model )?(?:to|on)|(?:whole|full|entire) (?:\w+ )?model (?:is |was |gets )?(?:moved|placed|put|loaded) (?:to|onto|on) (?:each|every)", "the whole model is moved to the card"),
    ("says:on_gpu0", r"(?:missing|without|fixed by|fixed with|solved by|forgot\w*|after adding|needs?|not calling) (?:to call )?(?:torch\.cuda\.)?set_device|set_device\S* (?:was |is )?(?:missing|fixes|fixed|helps|helped|solves|solved|not called)", "the first GPU carries more than its share"),
    ("says:no_sync", r"(?<!no )\bunsharded grad\w*|gradients? (?:stay|remain|are kept|are) unsharded", "gradients wait without synchronisation, unsharded"),
    ("says:one_unit", r"\b(?:no|without|missing|lacks?) (?:an? )?(?:nested|auto)[-_ ]?wrap\w*|auto_wrap_policy\s*(?:=|is|was)\s*(?:None|not set|missing)|\b(?:one|a single|single) (?:big |large |huge )?FSDP (?:unit|module|instance|wrapper)|only (?:the )?(?:root|outermost|top-level|whole)(?: model| module)? (?:is |was )?wrapped|wrap(?:s|ped)? only the (?:root|outermost|whole|entire)|reshard_after_forward\s*=\s*False|\bNO_SHARD\b", "one sharding unit holds the whole model, or units stay gathered"),
    ("says:keeps_graph", r"(?:fixed by|fixed with|solved by|helps to use|after adding|instead use|missing) (?:loss)?\.item\(\)|\.item\(\) (?:fixes|fixed|helps|helped|solves|solved)", "tensors are kept with their graph"),
    ("says:keeps_outputs", r"\b512[- ]?(?:B|bytes?)\b.{0,25}\b(?:each\b|per (?:tensor|scalar|value|step|update))|scalars? (?:tensors? )?(?:are |is )?(?:kept|stored|appended|collected)", "small results are kept, each in a block of its own"),
    ("says:keeps_graph", r"\.append\(\s*\w*loss\w*\s*\)|loss\w*\s*\+=\s*\w*loss\b(?!\w*\.(?:item|detach))|loss(?:es)? (?:is |are )?kept as (?:a )?tensors?|\.?detach\(\) (?:solves|solved|fixes|fixed|helps|helped)", "tensors are kept with their graph"),
    ("says:keeps_outputs", r"\b(?:preds?|predictions|outputs|results)\s+(?:pile up|accumulate|stay|remain)\b", "results of every step are kept"),
    ("says:packing_helps", r"(?:max_split_size(?:_mb)?|expandable[_ ]segments|garbage_collection_threshold)\S*\s+(?:fixes|fixed|helps|helped|solves|solved|cures|works)\b|(?<!not )(?:fixed|solved|cured|gone|works|fits|trains) (?:by|with|after|once|when) (?:setting )?\S*(?:max_split_size|expandable[_ ]segments)", "an allocator setting cures it"),
    ("says:whole_model", r"FSDP\(\s*model\.(?:cuda|to)\(|(?:to\(\w*\)|cuda\(\)|moved|built|materiali[sz]ed)(?: \w+){0,5} before (?:FSDP|fully_shard|shard\w*|wrap\w*)", "the whole model is made before it is sharded"),
    ("phase:init", r"FSDP\(\s*model\.(?:cuda|to)\(|(?:to\(\w*\)|cuda\(\)|moved|built|materiali[sz]ed)(?: \w+){0,5} before (?:FSDP|fully_shard|shard\w*|wrap\w*)", "the whole model is made before it is sharded"),
    ("phase:load", r"\btorch\.load\b|\b(?:each|every|all)(?: \w+)? loads? (?:[\d.]+ ?[GT]i?B|the|its|a)\b", "it happens while weights are loaded"),
    ("says:no_effect", r"checkpoint\w* (?:wraps|around|over) (?:the )?(?:whole|entire) (?:model|network|forward)|hint (?:still |again )?(?:suggests|says|recommends)|(?:\bset|\bon|enabled),? (?:but|and) still (?:OOMs?|fails)", "a fix changed nothing"),
    ("says:python_objects", r"\blists? of (?:tuples|dicts|dictionaries|(?:file ?)?(?:paths|names)|captions|annotations|records|sentences)\b", "the data set is a Python list"),
    ("says:host", r"\boom[-_ ]kill\w*", "host memory is meant"),
    ("says:pagefile", r"(?:[Ii]ncreas\w+|[Rr]aising|larger|more) (?:the )?(?:virtual memory|commit limit)", "the paging file matters"),
    ("says:invisible_process", r"\b(?:of|by|from) (?:a |another )?(?:colleague|coworker|someone else|other users?)\b|colleague's (?:job|process)", "another process holds the memory"),
    ("says:retry", r"\bsecond (?:run|call|attempt|try)\b.{0,15}\b(?:at )?(?:iter(?:ation)?|step|batch) ?[01]\b|\b(?:second|next) (?:run|call|attempt) (?:OOMs|fails|dies) (?:at once|immediately|right away|earlier)|\blast_traceback\b|\bexc_info\b|traceback (?:holds|keeps|references)", "it fails at once in the run after"),
    ("says:invisible_process", r"(?:nvidia-smi|GPU|card)\b.{0,30}(?<!no )(?<!not )\b(?:other|another|different|foreign|unknown|stale) (?:pids?|process(?:es)?|jobs?)\b|(?<!no )\b(?:other|another|stale|foreign) (?:pids?|process(?:es)?|job|user'?s? (?:job|process)) (?:holds?|uses|has|takes|occupies|owns|was (?:holding|using))", "another process holds the memory"),
    ("says:default_pool", r"\bdefault (?:caching )?(?:allocator|(?:memory )?pool) (?:passes|works|succeeds|fits|is (?:fine|ok))|(?:passes|works|fits|succeeds) (?:with|in|on|under|from) the default (?:caching )?(?:allocator|(?:memory )?pool)", "the default pool serves it"),
    ("says:pinned", r"(?:works?|fixed|fits?|passes|solved|fine|goes away|disappears)\b.{0,25}\b(?:pin_memory|pinned|pinning)|(?:disabling|without|turning off) (?:pin_memory|pinned|pinning)\b.{0,25}(?:works?|fits|passes|helps|fixes|solves)", "it works without pinned memory"),
    ("says:pagefile", r"(?:paging|page) ?file(?!.{0,25}(?:no help|not help|n't help|no effect|did nothing|changes? nothing|no difference|already))", "the paging file matters"),
    ("says:host", r"low_cpu_mem_usage\S*\s+(?:is |was |does |did )?(?:no|not|helps|fixes)\b|\bOOMKilled\b|\bexit(?:ed)?(?: with)?(?: code)? (?:137|247)\b", "host memory is meant"),
    ("says:logits", r"\bB\s*[*x×]\s*S\s*[*x×]\s*V\b|logits_to_keep", "the logits are involved"),
    ("says:giant", r"\[B, *[HN], *S, *S\]|(?:full|dense|eager) attention (?:matrix|scores?|weights)|attention (?:matrix|scores) (?:takes?|of|is) [\d.]+ ?[GT]i?B", "one attention matrix decides"),
    ("says:batch_one", r"\b(?:even|same|also|still)\b.{0,20}\b(?:batch(?:[ _-]?size)?|bs)(?: of)?\s*=?\s*(?:1|one)\b", "it does not depend on the batch"),
)  # fmt: skip


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[str, re.Pattern[str], str], ...]:
    """The table compiled; on first use, because most logs are read without it."""
    return tuple(
        (name, re.compile(p, 0 if name == "says:host" else re.IGNORECASE), text) for name, p, text in _WORDS
    )


_WORKS = r"(?:works?|fits?|fine|ok|passes|passed|gone|disappears|solved|stable|trains)"
_DENIED = re.compile(
    rf"(?P<works>\b{_WORKS}[, ]+)?\b(?:no|not|without|isn't|don't)(?: using| use| with| in)?(?: any| nn\.| torch\.)?\s*$",
    re.IGNORECASE,
)
_OFF = re.compile(
    r"\s*(?:is|was|are|were)?\s*(?:disabled|off|turned off|skipped|False|not (?:used|called) anywhere)\b|\s*(?:is|was) not (?:used|set|called)\b",
    re.IGNORECASE,
)
_WORKS_THEN = re.compile(rf"^[^.;]{{0,20}}\b(?:{_WORKS}|no (?:leak|growth|OOM|problem))\b", re.IGNORECASE)


def _is_denied(name: str, text: str, match: re.Match[str]) -> bool:
    """The text says that it does not use this.

    "Works without DDP" is no denial: what fails does use it.
    """
    if not name.startswith(("uses:", "phase:", "says:allowed")):
        return False
    if _OFF.match(text[match.end() :]):
        return True
    before = _DENIED.search(text[max(0, match.start() - 40) : match.start()])
    return before is not None and not before["works"] and not _WORKS_THEN.search(text[match.end() :])


def from_words(text: str, source: str = "words", strength: float = STRENGTH) -> tuple[Signal, ...]:
    """Signals of a description. One signal per name: the first pattern that matches."""
    found: dict[str, Signal] = {}
    for name, pattern, sentence in _patterns():
        if name in found:
            continue
        match = next((m for m in pattern.finditer(text) if not _is_denied(name, text, m)), None)
        if match:
            found[name] = Signal(name, f"{sentence} (“{match.group().strip()[:60]}”)", source, strength)
    for name, sentence, match in from_relations(text):
        if name not in found and not _is_denied(name, text, match):
            quoted = f"{sentence} (“{match.group().strip()[:60]}”)"
            found[name] = Signal(name, quoted, source, strength)
    for name, sentence in from_figures(text):
        found.setdefault(name, Signal(name, sentence, source, strength))
    return tuple(found.values())


#: `when` of a report, or of a form that a person fills in.
WHEN: dict[str, tuple[str, ...]] = {
    "phase_save": ("phase:save",),
    "phase_resume": ("phase:resume",),
    "phase_eval": ("phase:eval",),
    "optimizer_step": ("phase:optimizer",),
    "load": ("phase:load",),
    "first_iter": ("says:first",),
    "early_iter": ("says:not_first",),
    "growing": ("says:growing",),
    "growing_hours": ("says:growing",),
    "random_iter": ("says:random",),
    "late_random": ("says:late", "says:random"),
    "retry": ("says:retry",),
}


def from_when(when: str, strength: float = 0.8) -> tuple[Signal, ...]:
    """Signals of a stated time of failure."""
    return tuple(
        Signal(name, f"it happens: {when.replace('_', ' ')}", "words", strength)
        for name in WHEN.get(when, ())
    )
