"""A trace on disk: the passes of one engine over a batch.

    TRACE/
      trace.json            engine, options, versions, attributes, tokenised prompts, passes
      tokens.parquet        the TokenBatch
      weights.parquet       name, shape, dtype and digest of every canonical parameter
      prompts.jsonl         the prompts
      checksums.json        of these files and of every finished pass's pass.json
      worker.log            the output of the engine's process
      PASS/                 decode, prefill, decode.untapped, decode.repeat ...
        pass.json           sites, rows, and every other file's checksum; written last
        rows.parquet        a row for each site, sample and position: digest, statistics, and the
                            location of its values; `SITE@rankN` has rows of which that rank has a
                            different copy
        values-00000.safetensors ...   one tensor `[rows, features]` per site in each file

No file needs this package: pyarrow and DuckDB read Parquet, and safetensors reads values.
"""
