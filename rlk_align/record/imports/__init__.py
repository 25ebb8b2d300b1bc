"""Other tools' recordings -> a recording of one side, with the sites that their files have.

formats                               the formats by name
sglang_dumper, msprobe, rl_kernel     a file for each format: files -> Source
source, files                         what a reader returns; files of tensors
places, values                        which module's tensor is which site, and its values
sequences                             which (sequence, position) a row is
importing, write                      Source + sequences -> the recording
"""
