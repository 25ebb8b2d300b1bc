"""A Trace on disk: what one engine did with a batch, pass by pass.

    TRACE/
      trace.json            engine, options, versions, attributes, tokenised prompts, passes
      tokens.parquet        the TokenBatch
      weights.parquet       name, shape, dtype and digest of every canonical parameter
      prompts.jsonl         the prompts, as they were given
      checksums.json        of these files and of every finished pass's pass.json
      worker.log            what the engine's process printed
      PASS/                 decode, prefill, decode.untapped, decode.repeat ...
        pass.json           sites, rows, and every other file's checksum; written last
        rows.parquet        a row per site, sample and position: digest, statistics, and where
                            its values lie; `SITE@rankN` are rows of which that rank holds
                            another copy
        values-00000.safetensors ...   one tensor `[rows, features]` per site in each file

Everything is readable without this package: Parquet with pyarrow or DuckDB, values with
safetensors.
"""
